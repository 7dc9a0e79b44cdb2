"""What a run runs with: the versions, the device, and the commit where Ebbtide knows it."""

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
"""A checkout on a slow disk costs its commit, never the run."""


def start(step: int, device: torch.device) -> dict[str, object]:
    """A line of versions.jsonl, for a process that goes on after this step."""
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ebbtide": ebbtide.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": _called(device),
    }


def _called(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def commit() -> str | None:
    """Of Ebbtide: what pip says it was installed from, or the checkout that it runs in. None for a release."""
    try:
        told = json.loads(metadata.distribution("ebbtide").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # run from a folder on the path, and never installed
        told = {}
    installed = told.get("vcs_info", {}).get("commit_id")
    return installed if isinstance(installed, str) else checked_out(Path(ebbtide.__file__).parent)


def checked_out(package: Path) -> str | None:
    """The commit of the checkout that tracks this package, and whether files of it were changed since. A package that
    lies in somebody's repository without being tracked there (in its virtual environment) has none."""
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
