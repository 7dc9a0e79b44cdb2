"""`manifest.json`: the files of a checkpoint, each with its size and SHA-256. No other is read. Imports no torch."""

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
Name = Annotated[str, StringConstraints(pattern=rf"^({PART}/)*{PART}$", max_length=255)]
"""Below the checkpoint's folder whatever it is: not absolute, and no part of it is empty, `.` or `..`."""
MALFORMED = (ArithmeticError, AttributeError, EOFError, LookupError, PickleError, RuntimeError, TypeError, ValueError)
"""What reading a file's contents raises where they are not what they should be."""


class Damaged(UserError):  # noqa: N818
    """A checkpoint that is not to be trusted, and why."""

    def __init__(self, folder: Path, why: str) -> None:
        other = "choose another (`ebbtide checkpoints RUN --verify` lists them)"
        super().__init__(f"the checkpoint {folder} is damaged ({why}): {other}")
        self.why = why


class Record(BaseModel):
    """What a JSON file of a checkpoint holds: of these types exactly."""

    model_config = ConfigDict(strict=True, frozen=True)


class File(Record):
    size: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


Files = dict[str, File]
"""By name, relative to the checkpoint's folder."""


class Manifest(Record):
    step: NonNegativeInt
    metrics: dict[str, float]
    files: Annotated[dict[Name, File], Field(min_length=1)]


R = TypeVar("R", bound=Record)


class Listed:
    """A checkpoint's folder, and what its manifest lists of it: the one way to its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self._parsed(Manifest, MANIFEST)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def damaged(self, why: str) -> Damaged:
        return Damaged(self.folder, why)

    def path(self, name: str) -> Path:
        """Of a file that is listed."""
        if name not in self:
            raise self.damaged(f"{MANIFEST} does not list {shown(name)}")
        return self._inside(name)

    def read(self, name: str) -> bytes:
        return self._contents(self.path(name))

    def record(self, kind: type[R], name: str) -> R:
        """What a JSON file that is listed holds."""
        self.path(name)
        return self._parsed(kind, name)

    def compare(self) -> None:
        """Reads every file whole; raises what is not as it was written."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._compare, self.manifest.files))

    def _compare(self, name: str) -> None:
        path, file = self.path(name), self.manifest.files[name]
        if (size := path.stat().st_size) != file.size:
            raise self.damaged(f"{name} has {size} bytes instead of {file.size}")
        try:
            same = digest(path) == file.sha256
        except OSError as error:
            raise self.damaged(f"{name} cannot be read: {error.strerror}") from None
        if not same:
            raise self.damaged(f"{name} has other contents than were written")

    def _inside(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise self.damaged(f"{name} is missing")
        if not path.is_file():  # a pipe would be waited for
            raise self.damaged(f"{name} is no ordinary file")
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise self.damaged(f"{name} is a link that leads out of the checkpoint")
        return path

    def _contents(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.damaged(f"{path.name} cannot be read: {error.strerror}") from None

    def _parsed(self, kind: type[R], name: str) -> R:
        try:
            return kind.model_validate_json(self._contents(self._inside(name)))
        except ValidationError as error:
            raise self.damaged(f"{name} is not what a run writes: {first(error)}") from None


def first(error: ValidationError) -> str:
    """The first thing that is wrong, on one line."""
    problem = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, problem["loc"]))
    return shown(f"{key}: {problem['msg']}" if key else problem["msg"])


def shown(text: str) -> str:
    """Text from a file, in a message: short, and without what a terminal would act on."""
    return repr(text if len(text) <= 200 else text[:200] + "...")[1:-1]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
