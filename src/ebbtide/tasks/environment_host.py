"""The host of environments: a process that imports them once, and forks a process for each episode.

So an episode starts in milliseconds, and whatever it does to its process, it does to no other that is under way.
"""

from __future__ import annotations

import importlib
import io
import os
import random
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ebbtide.config.environment import BUILTIN_ENVIRONMENTS, EnvironmentConfig
from ebbtide.errors import UserError
from ebbtide.system.printable import cut_middle
from ebbtide.tasks.channel import read_request
from ebbtide.tasks.environment import Environment
from ebbtide.tasks.environment_message import Answer, Failed, encode_answer
from ebbtide.tasks.policy_handle import PolicyFacts
from ebbtide.tasks.process_guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, kill_descendants, prctl
from ebbtide.tasks.score_message import MAX_MESSAGE, encode_message

CLOSE_SECONDS = 10  # For an environment to close itself.
MAX_ORDER = 1 << 20  # Bytes of a message to the host.


def host_environments(channel: int) -> None:
    """The main function of the host: imports what makes environments, then starts and ends processes as it is told."""
    with socket.socket(fileno=channel) as run:
        config, facts = read_request(io.BytesIO(run.recv(MAX_ORDER)))
        try:
            make = find_environment(config)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code: the run reports what it raised)
            why = str(error) if isinstance(error, UserError) else traceback.format_exc()
            run.sendall(encode_message("unbuilt", cut_middle(why, MAX_MESSAGE)))
            return
        run.sendall(encode_message("ready"))
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # What an episode's process leaves behind becomes a child of the host.
        processes: dict[int, int] = {}  # the number of an episode -> its process
        while True:
            order, ends, _, _ = socket.recv_fds(run, 64, 1)
            if not order:
                return  # the run is over, and the guard ends what is left
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                    processes = {number: process for number, process in processes.items() if process != ended}
            verb, number = order.split()
            if verb == b"start":
                processes[int(number)] = _start(run, ends[0], config, facts, make)
            else:
                processes.pop(int(number), None)
                kill_descendants(os.getpid(), keep=set(processes.values()))


def find_environment(config: EnvironmentConfig) -> Callable[..., Any]:
    """The class or function that makes environments."""
    name = config.object
    if name in BUILTIN_ENVIRONMENTS:
        name = f"ebbtide.tasks.environments.{name}:make"
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"`task.environment.object: {config.object}` cannot be imported (from {os.getcwd()} or the installed"
            f" packages): {error}"
        ) from None
    if not callable(found):
        raise UserError(
            f"`task.environment.object: {config.object}` is a {type(found).__name__}: name a class, or a function that"
            " returns an environment"
        )
    make: Callable[..., Any] = found
    return make


def _start(
    run: socket.socket, end: int, config: EnvironmentConfig, facts: PolicyFacts, make: Callable[..., Any]
) -> int:
    """Forks a process for an episode, which answers on this end of a socket. Returns its number."""
    host, process = os.getpid(), os.fork()
    if process == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == host:
                run.close()
                os.setsid()
                limit = config.memory_mib << 20
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                _play(end, config, facts, make)
        finally:
            _end()
    os.close(end)
    return process


def _play(end: int, config: EnvironmentConfig, facts: PolicyFacts, make: Callable[..., Any]) -> None:
    """Plays episodes one after the other, each with a new environment, until the run closes its end."""
    process, environment = os.getpid(), None
    with socket.socket(fileno=end) as run, run.makefile("rb") as requests:
        while True:
            try:
                ticket, verb, *arguments = read_request(requests)
            except EOFError:
                break
            answer: Answer
            try:
                if environment is None:
                    _seed(arguments)
                    environment = Environment(make(**config.options), facts)
                answer = getattr(environment, verb)(*arguments)
                if verb in ("describe", "finish"):
                    with suppress(Exception):  # What it gave is valid, whether or not it can be closed.
                        environment.close()
                    environment = None
            except Exception as error:  # noqa: BLE001 (foreign code: what it raises costs this episode)
                answer = Failed("error", f"{type(error).__name__}: {error}")
            if os.getpid() != process:
                os._exit(1)  # An environment forked, and this is the child: only the parent may answer.
            try:
                line = encode_answer(ticket, answer)
            except (TypeError, ValueError, RecursionError) as error:
                line = encode_answer(ticket, Failed("error", f"the environment's answer cannot be sent: {error}"))
            run.sendall(line)
    signal.alarm(CLOSE_SECONDS)
    if environment is not None:
        with suppress(Exception):
            environment.close()


def _seed(arguments: list[Any]) -> None:
    """Seeds the global random numbers that environments tend to use, by the seed of the episode."""
    seed = next((one for one in arguments if isinstance(one, int)), 0)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _end() -> NoReturn:
    """Ends this process and what it has started in its session."""
    with suppress(ProcessLookupError):  # it has no session of its own yet
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
