"""What can be found wrong before torch is loaded: the packages that serving needs, and the API key."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ebbtide.errors import UserError

KEY = "EBBTIDE_API_KEY"


def check_installed() -> None:
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"serving needs the package `{name}`, which is not installed: pip install -c constraints.txt 'ebbtide[serve]'")


def api_key(file: Path | None) -> str | None:
    """From a file, or from the environment; None where neither has one."""
    if file is None:
        return os.environ.get(KEY, "").strip() or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the file with the API key cannot be read: {error}") from None
    if not key:
        raise UserError(f"{file} is empty: it must hold the API key")
    return key
