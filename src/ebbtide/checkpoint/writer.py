"""A process of its own that writes checkpoints, so that the loop's Python never waits for files; `Writer` is its handle in the run.

It asks for one tensor after the other; the run puts each into memory that both share. It ends when the run does, however that ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebbtide.checkpoint.index import TENSORS
from ebbtide.checkpoint.manifest import Files
from ebbtide.checkpoint.sizes import SLOTS
from ebbtide.checkpoint.store import digests, why
from ebbtide.checkpoint.tensors import Entry, Everyone, Share, write_tensors


class Writer:
    """The run's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._memory = os.memfd_create("ebbtide-checkpoint", os.MFD_CLOEXEC)
        passed = (theirs.fileno(), self._memory)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "ebbtide.checkpoint.writer", *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,  # a Ctrl-C is the run's to handle
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def write(self, folder: Path, everyone: Everyone, fill: Callable[[str, Tensor], None], share: Share) -> tuple[list[Any], Files]:
        """Has this rank's share written; `fill` puts a tensor into memory. Gives what was written, and the files with their digests."""
        entries = everyone[share.rank]
        by_name = {entry.name: entry for entry in entries}
        slot = max(entry.bytes for entry in entries) if entries else 0
        slot = max(1, -(-slot // mmap.PAGESIZE)) * mmap.PAGESIZE
        threads = min(SLOTS, max(1, len(entries)))
        os.ftruncate(self._memory, slot * threads)
        window = mmap.mmap(self._memory, slot * threads)
        try:
            self._connection.send((str(folder), everyone, share, slot, threads))
            while True:
                kind, *rest = self._connection.recv()
                if kind == "wants":
                    name, number = rest
                    fill(name, by_name[name].within(window, number * slot))
                    self._connection.send(None)
                elif kind == "written":
                    results, files = rest
                    return results, files
                else:
                    raise OSError(rest[0])
        except (EOFError, ConnectionError) as error:
            raise OSError(f"the process that writes checkpoints ended with code {self._process.wait()}") from error
        finally:
            del window
            os.ftruncate(self._memory, 0)

    def kill(self) -> None:
        """Ends the process, also in the middle of a write, which then fails."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()
        os.close(self._memory)


class _Line:
    """To the run. When that is over so is this process, at once: a thread of torch's would end in a traceback."""

    def __init__(self, handle: int) -> None:
        self._connection = Connection(handle)

    def send(self, words: Any) -> None:
        try:
            self._connection.send(words)
        except OSError:
            os._exit(0)

    def recv(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # the second in the middle of a message
            os._exit(0)


def _serve(line: _Line, memory: int) -> None:
    """The process's side."""
    torch.serialization.set_crc32_options(False)  # takes as long as writing, and every file has a better digest
    while True:
        folder, everyone, share, slot, threads = line.recv()
        asking = _Asking(line, everyone[share.rank], mmap.mmap(memory, slot * threads), slot)
        try:
            results = write_tensors(Path(folder), everyone, asking, share, threads)
            line.send(("written", results, digests(Path(folder), f"{TENSORS}/__{share.rank}_*")))
        except Exception as error:  # noqa: BLE001 (whatever it is, the run says it)
            line.send(("failed", why(error)))


class _Asking:
    def __init__(self, line: _Line, entries: Sequence[Entry], window: mmap.mmap, slot: int) -> None:
        self._line, self._window, self._slot = line, window, slot
        self._entries = {entry.name: entry for entry in entries}
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}

    def __call__(self, name: str) -> Tensor:
        with self._lock:
            # A thread is done with its last tensor when it wants the next.
            number = self._numbers.setdefault(threading.get_ident(), len(self._numbers))
            self._line.send(("wants", name, number))
            self._line.recv()
        return self._entries[name].within(self._window, number * self._slot)


if __name__ == "__main__":
    threading.excepthook = lambda _: None  # what torch's threads cannot write is counted, and the run says so
    _serve(_Line(int(sys.argv[1])), int(sys.argv[2]))
