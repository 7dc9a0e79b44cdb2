"""The run's side of environments: a process for each episode under way, and their answers as they come. A process whose
episode has ended plays another one, with a new environment.

An environment is foreign code, driven by what a model wrote. So one that hangs is killed, one that dies or sends
anything but an answer is given up, and only its episode is lost.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from ebbtide.config.environment import EnvironmentConfig
from ebbtide.errors import UserError
from ebbtide.tasks.channel import BrokenProcess, Channel, encode_request
from ebbtide.tasks.environment import Description
from ebbtide.tasks.environment_message import MAX_LINE, Answer, Failed, decode_answer
from ebbtide.tasks.guarded_process import GuardedProcess
from ebbtide.tasks.policy_handle import NOTHING_KNOWN, PolicyFacts
from ebbtide.tasks.score_message import decode_message

START_SECONDS = 120.0  # The host imports the environment's packages: seconds, but far more on a loaded machine.
LONGEST_WAIT = 3600.0  # Seconds; `poll` does not accept unbounded numbers.


class EnvironmentProcess:
    """The process of one episode, and the request that it has not answered yet."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number, self.channel = number, channel
        self.ticket = 0
        self.sent = self.deadline = self.limit = 0.0
        self.seconds = 0.0
        """The time that its answers took, added up."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come from it since its last answer, not even its end."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        return not poll.poll(0) and not self.channel.has_extra_output

    def answer(self) -> Answer | None:
        """The answer to the request, once there is one."""
        try:
            line = self.channel.receive()
            if line is not None:
                return decode_answer(line, self.ticket)
        except BrokenProcess as error:
            return Failed("crash", str(error))
        except ValueError as error:
            return Failed("error", f"the environment's process sent something that is not an answer: {error}")
        if time.monotonic() >= self.deadline:
            return Failed("timeout", f"no answer within {self.limit:g} s (`task.environment.timeout_s`)")
        return None


class EnvironmentPool:
    """Processes that each play an episode; use it as a context manager."""

    def __init__(self, config: EnvironmentConfig, facts: PolicyFacts = NOTHING_KNOWN) -> None:
        """`facts`: what environments that drive their episodes may know of the policy."""
        self._config, self._facts = config, facts
        self._asked: dict[int, EnvironmentProcess] = {}  # by the number of the socket
        self._idle: list[EnvironmentProcess] = []
        self._number = 0
        self._start_host()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._asked.values(), *self._idle):
            process.channel.close()
        self._stop_host()

    def _start_host(self) -> None:
        self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._host = GuardedProcess("ebbtide.tasks.environment_host:host_environments", theirs, self._config.python)
        try:
            self._orders.send(encode_request((self._config, self._facts)))
            self._orders.settimeout(START_SECONDS)
            message = self._orders.recv(1 << 18)
            found = decode_message(message.rstrip(b"\n")) if message else ("unbuilt", "its process died")
        except (OSError, ValueError) as error:
            found = ("unbuilt", f"its process gave no answer: {error}")
        if found[0] != "ready":
            self._stop_host()
            raise UserError(str(found[1]))

    def _stop_host(self) -> None:
        self._orders.close()
        self._host.stop()

    def describe(self) -> Description:
        """Makes one environment, to see what it is."""
        process = self.open()
        self.ask(process, "describe")
        process.limit = START_SECONDS
        process.deadline = process.sent + process.limit
        while not (answers := self.answers(LONGEST_WAIT)):
            pass
        ((_, answer),) = answers
        self.close(process, hard=isinstance(answer, Failed))
        if isinstance(answer, Description):
            return answer
        why = answer.message if isinstance(answer, Failed) else "it does not describe itself"
        raise UserError(
            f"`task.environment.object: {self._config.object}` gives no environment with `task.environment.options:"
            f" {self._config.options}`: {why}"
        )

    def open(self) -> EnvironmentProcess:
        """A process for an episode: one whose last episode has ended, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.is_quiet:
                process.seconds = 0.0
                return process
            self.close(process, hard=True)  # It has died, or said something that nobody asked for.
        ours, theirs = socket.socketpair()
        self._number += 1
        with theirs:
            try:
                socket.send_fds(self._orders, [b"start %d" % self._number], [theirs.fileno()])
            except OSError:  # foreign code has killed or stopped the host
                self._stop_host()
                self._start_host()
                socket.send_fds(self._orders, [b"start %d" % self._number], [theirs.fileno()])
        cause = "it crashed, was killed, or exceeded `task.environment.memory_mib`"
        return EnvironmentProcess(self._number, Channel(ours, "the environment's process", MAX_LINE, lambda: cause))

    def ask(self, process: EnvironmentProcess, verb: str, *arguments: Any) -> None:
        """Sends a request, which `answers` will return the answer of."""
        process.ticket += 1
        process.sent = time.monotonic()
        process.limit = self._config.timeout_s
        process.deadline = process.sent + process.limit
        process.channel.send((process.ticket, verb, *arguments))
        self._asked[process.channel.fileno()] = process

    @property
    def is_awaiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def answers(self, wait: float) -> list[tuple[EnvironmentProcess, Answer]]:
        """The answers that have come, in the order of the processes. Waits so many seconds for the first one."""
        found: list[tuple[EnvironmentProcess, Answer]] = []
        due = self._ready(self._asked.values(), wait)
        for process in sorted(due, key=lambda one: one.number):
            answer = process.answer()
            if answer is not None:
                del self._asked[process.channel.fileno()]
                process.seconds += time.monotonic() - process.sent
                found.append((process, answer))
        return found

    def _ready(self, processes: Iterable[EnvironmentProcess], wait: float) -> Sequence[EnvironmentProcess]:
        """Those that have sent something, can receive more, have died, or are out of time."""
        if not self._asked:
            return []
        poll = select.poll()
        for number, process in self._asked.items():
            poll.register(number, process.channel.poll_events)
        left = min(process.deadline for process in processes) - time.monotonic()
        ready = {number for number, _ in poll.poll(1000 * max(0.0, min(wait, left, LONGEST_WAIT)))}
        now = time.monotonic()
        return [one for number, one in self._asked.items() if number in ready or one.deadline <= now]

    def close(self, process: EnvironmentProcess, *, hard: bool) -> None:
        """Takes the process of an episode back: for another one, unless it has failed (`hard`). What it was asked last
        has been answered then."""
        if not hard and not process.channel.has_extra_output:
            self._idle.append(process)
            return
        self._asked.pop(process.channel.fileno(), None)
        process.channel.close()
        with suppress(OSError):  # the host has died, and all below it with it; or it is stopped, and starts anew
            self._orders.send(b"kill %d" % process.number)
