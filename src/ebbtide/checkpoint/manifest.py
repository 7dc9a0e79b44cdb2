"""`manifest.json`: the list of a checkpoint's files, each with its size and SHA-256. No other file is read. Imports no
torch."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import PickleError
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, StringConstraints, ValidationError

from ebbtide.errors import UserError

MANIFEST = "manifest.json"
PART = r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]*"
FileName = Annotated[str, StringConstraints(pattern=rf"^({PART}/)*{PART}$", max_length=255)]
"""A file name that stays below the checkpoint's folder: not absolute, and no component is empty, `.` or `..`."""
MALFORMED = (ArithmeticError, AttributeError, EOFError, LookupError, PickleError, RuntimeError, TypeError, ValueError)
"""The exceptions that reading a malformed file raises."""


class DamagedCheckpoint(UserError):  # noqa: N818
    """The error for a checkpoint that cannot be trusted, and why."""

    def __init__(self, folder: Path, why: str) -> None:
        other = "choose another (`ebbtide checkpoints RUN --verify` lists them)"
        super().__init__(f"the checkpoint {folder} is damaged ({why}): {other}")
        self.why = why


class Record(BaseModel):
    """The contents of a JSON file of a checkpoint; types are checked strictly."""

    model_config = ConfigDict(strict=True, frozen=True)


class FileDigest(Record):
    size: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


Files = dict[str, FileDigest]
"""Files by name, relative to the checkpoint's folder."""


class Manifest(Record):
    step: NonNegativeInt
    metrics: dict[str, float]
    files: Annotated[dict[FileName, FileDigest], Field(min_length=1)]


R = TypeVar("R", bound=Record)


class CheckpointFiles:
    """A checkpoint's folder and its manifest: the only way to read its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self._parsed(Manifest, MANIFEST)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def damage_error(self, why: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.folder, why)

    def path(self, name: str) -> Path:
        """The path of a file that the manifest lists."""
        if name not in self:
            raise self.damage_error(f"{MANIFEST} does not list {safe_excerpt(name)}")
        return self._inside(name)

    def read(self, name: str) -> bytes:
        return self._contents(self.path(name))

    def record(self, kind: type[R], name: str) -> R:
        """The contents of a JSON file that the manifest lists."""
        self.path(name)
        return self._parsed(kind, name)

    def verify(self) -> None:
        """Reads every file, and raises if one is not as it was written."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._compare, self.manifest.files))

    def _compare(self, name: str) -> None:
        path, file = self.path(name), self.manifest.files[name]
        if (size := path.stat().st_size) != file.size:
            raise self.damage_error(f"{name} has {size} bytes instead of {file.size}")
        try:
            same = digest(path) == file.sha256
        except OSError as error:
            raise self.damage_error(f"{name} cannot be read: {error.strerror}") from None
        if not same:
            raise self.damage_error(f"{name} has other contents than were written")

    def _inside(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise self.damage_error(f"{name} is missing")
        if not path.is_file():  # reading a pipe would wait for ever
            raise self.damage_error(f"{name} is not a regular file")
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise self.damage_error(f"{name} is a link that leads out of the checkpoint")
        return path

    def _contents(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.damage_error(f"{path.name} cannot be read: {error.strerror}") from None

    def _parsed(self, kind: type[R], name: str) -> R:
        try:
            return kind.model_validate_json(self._contents(self._inside(name)))
        except ValidationError as error:
            raise self.damage_error(f"{name} is not what a run writes: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation error, on one line."""
    problem = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, problem["loc"]))
    return safe_excerpt(f"{key}: {problem['msg']}" if key else problem["msg"])


def safe_excerpt(text: str) -> str:
    """Text from a file, safe to show in a message: short, and without terminal control sequences."""
    return repr(text if len(text) <= 200 else text[:200] + "...")[1:-1]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
