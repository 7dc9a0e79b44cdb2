"""Starts and ends a process that runs foreign code, below a guard (process_guard.py) that kills all it has started."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ebbtide.tasks.process_guard import kill_descendants

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2]) or [*sys.path, sys.argv[4], ""]
from ebbtide.tasks.process_guard import main
main(int(sys.argv[1]), sys.argv[3])
"""
"""The program of the guard. It gets this process's sys.path as an argument, so that no environment variable for it
reaches what foreign code starts."""
OWN_FOLDER = str(Path(__file__).parents[2])
GRACE = 10.0  # Seconds for the guard to kill everything below it.


class GuardedProcess:
    """A guard and its child."""

    def __init__(self, entry: str, channel: socket.socket, python: str | None = None) -> None:
        """`entry`: `module:function` that the child calls with the number of `channel`, its end of a socket. `python`:
        another Python than this one, which has its own packages and of these Ebbtide alone."""
        path = json.dumps([] if python else [path for path in sys.path if path])
        with channel:
            self._guard = subprocess.Popen(  # noqa: S603
                [python or sys.executable, "-P", "-c", START, str(channel.fileno()), path, entry, OWN_FOLDER],
                pass_fds=(channel.fileno(),),
                start_new_session=True,  # Ctrl-C is for the run to handle.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # What foreign code prints is not the run's output.
                stderr=subprocess.DEVNULL,
            )

    def cause(self) -> str:
        """How the process died: a signal or an exit code."""
        with suppress(subprocess.TimeoutExpired):
            code = self._guard.wait(GRACE)
            code = -code if code < 0 else code - 128  # The guard passes on how its child ended.
            return signal.Signals(code).name if code in set(signal.Signals) else f"exit code {code + 128}"
        return "its guard is stopped"

    def stop(self) -> None:
        """Ends the guard and everything below it, once the run's end of the socket is closed."""
        try:
            self._guard.wait(GRACE)
        except subprocess.TimeoutExpired:  # Foreign code has stopped the guard as well.
            kill_descendants(self._guard.pid)
            self._guard.kill()
            self._guard.wait()
