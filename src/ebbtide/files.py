"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebbtide.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, none for this user, none for so large a file


def made_as(path: Path) -> Path:
    """What a file is called while it is made."""
    return path.with_name(f".{path.name}.new")


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file by one of these parts, synced; where that fails, the old one stays as it was.

    A link is followed. A device or a pipe is never replaced: as root, `/dev/null` would be gone for the whole machine.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It is no ordinary file", str(path))
    beside = made_as(path)
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def append_whole(path: Path, data: bytes) -> None:
    """All or nothing, to a file that is there. A disk that fills up takes a part of a write, and fails the next."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)  # what was removed is not begun again, without all that it had
    begin, rest = os.fstat(handle).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    finally:
        if rest:
            with suppress(OSError):
                os.ftruncate(handle, begin)
        os.close(handle)


def unwritable(path: Path, error: OSError, fix: str) -> UserError:
    return UserError(f"{path} cannot be written: {error.strerror or error}. {fix}")


@contextmanager
def disk_full() -> Iterator[None]:
    """Around a whole command: whatever it was that found no room on a disk, a user can mend that."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = error.filename or "a file"
        raise UserError(f"{place} cannot be written: {error.strerror}. Make room, or write elsewhere") from None
