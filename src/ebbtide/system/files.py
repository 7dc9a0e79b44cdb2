"""Atomic file writes: a file is written completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebbtide.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full, the quota is used up, the file is too large


def temporary_path(path: Path) -> Path:
    """The temporary name of a file while it is written."""
    return path.with_name(f".{path.name}.new")


def write_atomic(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file atomically by these parts, fsynced. If that fails, the old file is unchanged.

    A symbolic link is followed. A device or a pipe is never replaced: as root, that could remove `/dev/null` for the
    whole machine.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It is not an ordinary file", str(path))
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_atomic(path: Path, data: bytes) -> None:
    """Appends all of the data or none of it to an existing file. A disk that fills up takes a part of one write and
    fails the next."""
    # Without O_CREAT: a file that was removed must not come back without its earlier lines.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    size, rest = os.fstat(handle).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    finally:
        if rest:
            with suppress(OSError):
                os.ftruncate(handle, size)
        os.close(handle)


def write_error(path: Path, error: OSError, fix: str) -> UserError:
    """The error for a file that cannot be written; `fix` says what to do."""
    return UserError(f"{path} cannot be written: {error.strerror or error}. {fix}")


@contextmanager
def user_error_on_full_disk() -> Iterator[None]:
    """Turns the error of a write to a full disk into a UserError: the user can fix that."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        path = error.filename or "a file"
        raise UserError(f"{path} cannot be written: {error.strerror}. Free space, or write elsewhere") from None
