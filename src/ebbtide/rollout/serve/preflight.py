"""Checks before torch is loaded: the packages that serving needs, and the API key."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ebbtide.errors import UserError

API_KEY_VARIABLE = "EBBTIDE_API_KEY"


def check_installed() -> None:
    """Raises if a package of the HTTP server is not installed."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"serving needs the package `{name}`, which is not installed: pip install -c constraints.txt"
                " 'ebbtide[serve]'"
            )


def read_api_key(file: Path | None) -> str | None:
    """Reads the API key from a file or else from the environment; None if there is no key."""
    if file is None:
        return os.environ.get(API_KEY_VARIABLE, "").strip() or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the file with the API key cannot be read: {error}. Check `--api-key-file`") from None
    if not key:
        raise UserError(f"`--api-key-file {file}` is empty: write the API key into it")
    return key
