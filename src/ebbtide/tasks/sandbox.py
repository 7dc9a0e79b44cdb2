"""Runs Python that a model wrote, in a subprocess without network and with limits. docs/tools.md says what this
protects from and what it does not. Imports no torch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from ebbtide.errors import UserError
from ebbtide.tasks.process_guard import kill_descendants

Sandbox = Literal["namespaces", "none"]
"""`namespaces`: no network, no files but the system's and Python's own, no other processes. `none`: the limits alone,
where the kernel or a container forbids namespaces."""

CHILD = Path(__file__).with_name("sandbox_child.py")
READ_BYTES = 1 << 16
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits of a snippet."""

    seconds: float = 10.0
    """Of wall-clock time, for all of its processes; the limits on CPU time and memory are for each."""
    cpu_seconds: int = 10
    memory_mib: int = 1024
    disk_mib: int = 64
    """Of the largest file; in namespaces, of all files together, which are in memory."""
    processes: int = 32
    """With its threads. Not enforced for root without namespaces."""
    output_bytes: int = 10_000
    """Of stdout and of stderr that are kept: the first and the last half."""


USUAL = Limits()


@dataclass(frozen=True)
class Ran:
    """What a snippet wrote, and how it ended."""

    stdout: str
    stderr: str
    ended: Literal["finished", "failed", "killed", "timeout"]
    """By itself with exit code 0, or with another; by a signal; or at the limit of wall-clock time."""
    why: str
    """How it ended, as a sentence; empty if it finished."""

    def __str__(self) -> str:
        """All of it, as an observation for the model."""
        return "\n".join(part for part in (self.stdout.rstrip(), self.stderr.rstrip(), self.why) if part)


def run_python(code: str, sandbox: Sandbox = "namespaces", limits: Limits = USUAL) -> Ran:
    """Runs a snippet. Raises only if the kernel cannot isolate it."""
    with (
        tempfile.TemporaryDirectory(prefix="ebbtide-sandbox-", ignore_cleanup_errors=True) as staging,
        tempfile.TemporaryFile() as request,
    ):
        request.write(json.dumps(_request(code, sandbox, limits, staging)).encode())
        request.seek(0)
        status, theirs = os.pipe()
        with open(status, "rb", buffering=0) as reports:
            try:
                process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-I", "-S", "-B", str(CHILD), str(theirs)],
                    pass_fds=(theirs,),
                    stdin=request,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            with process:
                return _watch(process, reports, limits)


def python_tool(sandbox: Sandbox = "namespaces", limits: Limits = USUAL) -> Callable[[str], str]:
    """A tool that runs snippets, for `schema` and `call` of tool_functions.py."""

    def python(code: str) -> str:
        """Runs Python code and returns what it prints. Nothing is kept between two calls.

        Args:
            code: The code to run. Print what you want to see.
        """
        return str(run_python(code, sandbox, limits))

    return python


def _request(code: str, sandbox: Sandbox, limits: Limits, staging: str) -> dict[str, Any]:
    """What sandbox_child.py needs to know."""
    isolate = sandbox == "namespaces"
    work, snippet = ("/sandbox", "/snippet.py") if isolate else (f"{staging}/work", f"{staging}/snippet.py")
    if not isolate:
        os.mkdir(work)
    # Python itself, and the packages that it has.
    packages = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    return {
        "isolate": isolate,
        "root": staging,
        "readable": sorted({os.path.realpath(sys.base_prefix), *map(os.path.realpath, packages)}),
        "folder": work,
        "snippet": snippet,
        "code": code.encode(errors="replace").decode(),
        "disk_bytes": limits.disk_mib * MIB,
        "command": [os.path.realpath(sys.executable), "-s", "-B", "-u", snippet],
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(map(os.path.realpath, packages)),
            "PYTHONIOENCODING": "utf-8:replace",
            "OMP_NUM_THREADS": "1",
            "HOME": work,
            "TMPDIR": work,
            "LANG": "C.UTF-8",
        },
        "limits": {
            "RLIMIT_CPU": limits.cpu_seconds + 1,  # A second later it is killed even if it catches the first signal.
            "RLIMIT_AS": limits.memory_mib * MIB,
            "RLIMIT_FSIZE": limits.disk_mib * MIB,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
        },
    }


def _watch(process: subprocess.Popen[bytes], reports: IO[bytes], limits: Limits) -> Ran:
    """Reads what the snippet writes until it has ended or its time is over, then ends all of its processes."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds
    written = {process.stdout: _Kept(limits.output_bytes), process.stderr: _Kept(limits.output_bytes)}
    report = b""
    with selectors.DefaultSelector() as selector:
        for file in (reports, *written):
            selector.register(file, selectors.EVENT_READ)
        try:
            while not report and selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    if key.fileobj is reports:
                        report = data or b"{}"
                    else:
                        written[key.fileobj].add(data)  # type: ignore[index]
        finally:
            kill_descendants(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for file, kept in written.items():
        os.set_blocking(file.fileno(), False)  # Without namespaces, something may have escaped that keeps it open.
        with suppress(BlockingIOError):
            while data := os.read(file.fileno(), READ_BYTES):
                kept.add(data)
    found = json.loads(report.partition(b"\n")[0] or b"{}")
    if "refused" in found:
        raise UserError(
            f"the sandbox cannot cut the network here ({found['refused']}): allow user namespaces (in a container, run"
            " it with CAP_SYS_ADMIN), or write `sandbox: none`, with which snippets have your network and your files"
        )
    stdout, stderr = (kept.text for kept in written.values())
    if not report:
        return Ran(stdout, stderr, "timeout", f"The code was stopped after {limits.seconds:g} seconds.")
    return Ran(stdout, stderr, *_describe(found.get("code", -signal.SIGKILL), limits))


def _describe(code: int, limits: Limits) -> tuple[Literal["finished", "failed", "killed"], str]:
    if code == 0:
        return "finished", ""
    if code > 0:
        return "failed", f"The code ended with exit code {code}."
    if -code == signal.SIGXCPU:
        return "killed", f"The code was stopped after {limits.cpu_seconds} seconds of CPU time."
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return "killed", f"The code was killed by the signal {name}."


class _Kept:
    """The first and the last bytes of an output."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first, self._last, self._count = b"", b"", 0

    def add(self, data: bytes) -> None:
        self._count += len(data)
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last = (self._last + data[room:])[-self._half :]

    @property
    def text(self) -> str:
        missing = self._count - len(self._first) - len(self._last)
        between = f"\n[{missing} bytes left out]\n".encode() if missing else b""
        return (self._first + between + self._last).decode(errors="replace")
