"""Benchmarks whose processes start at once and measure one after another, since peers take a minute or more to start:
whoever has the turn is the only one that works, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from tempfile import mkdtemp

PIPES = "EBBTIDE_TURN"  # names two file descriptors: where to say that one is ready, and where to wait


@dataclass(frozen=True)
class Player:
    name: str
    command: Sequence[str]
    seconds: float = 180.0
    """How long its turn may take."""


def my_turn() -> None:
    """Called in a player once it has started and warmed up: waits for its turn. Alone, it has it."""
    if PIPES not in os.environ:
        return
    out, into = map(int, os.environ.pop(PIPES).split(","))
    os.write(out, b"ready")
    if not os.read(into, 1):
        sys.exit("the other processes have ended")


def in_turns(players: Sequence[Player], start_seconds: float) -> bool:
    """Starts all players, and gives each that is ready within `start_seconds` its turn, in their order, until it ends.
    What they print on stdout is shown; stderr goes to a file. Returns whether all went well."""
    began, logs = time.perf_counter(), Path(mkdtemp(prefix="ebbtide-turns-"))
    started = [_Started(player, logs / f"{index}.log") for index, player in enumerate(players)]
    done = []
    try:
        for one in started:
            problem = one.wait_until_ready(start_seconds - (time.perf_counter() - began))
            done.append((one, problem))
        print(f"started: {time.perf_counter() - began:.1f} s", flush=True)
        for one, problem in done:
            turn = time.perf_counter()
            problem = problem or one.take_turn()
            print(f"{one.player.name}: {problem or f'{time.perf_counter() - turn:.1f} s'}", flush=True)
            if problem:
                print("\n".join(one.log.read_text(errors="replace").splitlines()[-40:]), flush=True)
            one.problem = problem
    finally:
        for one in started:
            one.end()
    print(f"all: {time.perf_counter() - began:.1f} s, logs in {logs}", flush=True)
    return not any(one.problem for one in started)


class _Started:
    def __init__(self, player: Player, log: Path) -> None:
        self.player, self.log, self.problem = player, log, ""
        self._heard, theirs_out = os.pipe()
        theirs_in, self._say = os.pipe()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*player.command],
                stderr=errors,
                pass_fds=(theirs_out, theirs_in),
                env={**os.environ, PIPES: f"{theirs_out},{theirs_in}"},
            )
        os.close(theirs_out)
        os.close(theirs_in)

    def wait_until_ready(self, seconds: float) -> str:
        """What went wrong; empty if nothing did."""
        if not select([self._heard], [], [], max(0.0, seconds))[0]:
            self.end()  # its memory is needed
            return "not ready in time"
        return "" if os.read(self._heard, 16) else f"ended with {self._process.wait()} before it was ready"

    def take_turn(self) -> str:
        os.write(self._say, b"1")
        try:
            status = self._process.wait(self.player.seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return f"not done after {self.player.seconds:.0f} s"
        return f"ended with {status}" if status else ""

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
