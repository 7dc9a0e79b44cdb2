"""What a run runs with: the versions, the device, and the commit if it is known."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import ebbtide

GIT_SECONDS = 10.0
"""Timeout of a git command. On a slow disk the line has no commit; the run is not held up."""


def describe_start(step: int, device: torch.device) -> dict[str, object]:
    """A line of versions.jsonl, for a process that continues after this step (0 for a new run)."""
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ebbtide": ebbtide.__version__,
        "commit": find_commit(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": _device_name(device),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def find_commit() -> str | None:
    """The commit of Ebbtide that pip installed, or that of the checkout it runs in. None for a release."""
    try:
        source = json.loads(metadata.distribution("ebbtide").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # it runs from a folder on the path and is not installed
        source = {}
    installed = source.get("vcs_info", {}).get("commit_id")
    return installed if isinstance(installed, str) else checkout_commit(Path(ebbtide.__file__).parent)


def checkout_commit(package: Path) -> str | None:
    """The commit of the checkout that tracks this package, and whether files were changed since. None for a package
    that is inside a repository but not tracked there, such as one in a virtual environment."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{head} with changes" if head and changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        command = [git, "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
