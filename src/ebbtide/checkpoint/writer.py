"""The writer process, which writes checkpoints so that the loop's Python never waits for files. `Writer` is the run's
handle of it.

The process requests one tensor after the other, and the run puts each into shared memory. The process ends with the
run, however the run ends.
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

from ebbtide.checkpoint.costs import SLOTS
from ebbtide.checkpoint.entries import RankEntries, TensorEntry, WriteShare
from ebbtide.checkpoint.index import TENSORS
from ebbtide.checkpoint.manifest import Files
from ebbtide.checkpoint.store import compute_digests, describe_error
from ebbtide.checkpoint.tensors import write_tensors
from ebbtide.system.units import ceil_div


class Writer:
    """The run's handle of the writer process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._memory = os.memfd_create("ebbtide-checkpoint", os.MFD_CLOEXEC)
        passed = (theirs.fileno(), self._memory)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "ebbtide.checkpoint.writer", *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,  # so that a Ctrl-C reaches only the run
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def write(
        self, folder: Path, everyone: RankEntries, fill: Callable[[str, Tensor], None], share: WriteShare
    ) -> tuple[list[Any], Files]:
        """Lets the process write this rank's share; `fill` puts a tensor into memory. Returns the write results, and
        the files with their digests."""
        entries = everyone[share.rank]
        by_name = {entry.name: entry for entry in entries}
        slot = max(entry.bytes for entry in entries) if entries else 0
        slot = max(1, ceil_div(slot, mmap.PAGESIZE)) * mmap.PAGESIZE
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
            raise OSError(f"the writer process ended with code {self._process.wait()}") from error
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


class _Channel:
    """The process's channel to the run. When the run has ended, this process exits at once: a thread of torch would
    end in a traceback."""

    def __init__(self, handle: int) -> None:
        self._connection = Connection(handle)

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(0)

    def recv(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # OSError: the run ended in the middle of a message
            os._exit(0)


def _serve(channel: _Channel, memory: int) -> None:
    """The main loop of the writer process."""
    torch.serialization.set_crc32_options(False)  # takes as long as writing, and every file has a better digest
    while True:
        folder, everyone, share, slot, threads = channel.recv()
        source = _TensorSource(channel, everyone[share.rank], mmap.mmap(memory, slot * threads), slot)
        try:
            results = write_tensors(Path(folder), everyone, source, share, threads)
            channel.send(("written", results, compute_digests(Path(folder), f"{TENSORS}/__{share.rank}_*")))
        except Exception as error:  # noqa: BLE001 (whatever it is, the run reports it)
            channel.send(("failed", describe_error(error)))


class _TensorSource:
    """Requests tensors from the run; each of torch's threads has a slot of the shared memory."""

    def __init__(self, channel: _Channel, entries: Sequence[TensorEntry], window: mmap.mmap, slot: int) -> None:
        self._channel, self._window, self._slot = channel, window, slot
        self._entries = {entry.name: entry for entry in entries}
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}

    def __call__(self, name: str) -> Tensor:
        with self._lock:
            # A thread is done with its last tensor when it requests the next.
            number = self._numbers.setdefault(threading.get_ident(), len(self._numbers))
            self._channel.send(("wants", name, number))
            self._channel.recv()
        return self._entries[name].within(self._window, number * self._slot)


if __name__ == "__main__":
    threading.excepthook = lambda _: None  # `write_tensors` counts what torch's threads could not write, and raises
    _serve(_Channel(int(sys.argv[1])), int(sys.argv[2]))
