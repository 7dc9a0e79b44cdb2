"""Disks that fill up."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file becomes larger than this: of a write beyond it a part is taken, and the next one fails, as on a full
    disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
