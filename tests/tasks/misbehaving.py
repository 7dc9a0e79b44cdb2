"""A task whose scorer does what its completion says: hang, die, raise, return nonsense. For scoring processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from ebbtide.tasks.task import Problem, Problems, Score, ask

KEPT = []


class Misbehaving:
    def problems(self) -> Problems:
        return Problems([Problem(ask("p"), i) for i in range(4)], [])

    def score(self, problem: Problem, completion: str) -> Score:
        what, _, path = completion.partition(": ")
        match what:
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(3)
            case "exit when told":
                threading.Thread(target=lambda: (Path(path).read_text(), os._exit(3))).start()
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise RuntimeError("no idea")
            case "nan":
                return Score(float("nan"))
            case "nan part":
                return Score(1.0, {"part": float("inf")})
            case "huge":
                return Score(1e300)
            case "huge part":
                return Score(1.0, {"part": -1e300})
            case "many parts":
                return Score(1.0, {str(number): 1.0 for number in range(100_000)})
            case "long error":
                raise RuntimeError("no idea " * 4_000_000)
            case "odd name":
                return Score(0.5, {"\x1b[31m\ud800" + "n" * 1_000_000: 0.5})
            case "print":
                print("a scorer's chatter")
                print("a scorer's chatter", file=sys.stderr)
                subprocess.run(["sh", "-c", "echo a child\\'s chatter >&2"], check=False)
            case "fork":
                if os.fork() == 0:
                    raise OSError("what was to run in the child is not there")
            case "nothing":
                return None  # type: ignore[return-value]
            case "half a message":
                to_the_run(b"\0\0\1\0[")
                threading.Event().wait()
            case "half a message, then exit":
                to_the_run(b"\0\0\1\0[")
                os._exit(3)
            case "no message":
                to_the_run(b"\0\0\0\3abc\n")
            case "a message without end":
                while True:
                    to_the_run(b"\x7f" * 65536)
            case "two messages":
                to_the_run(b'["scored", 1, 9, {}, null, ""]\n' * 2)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stop all":
                os.kill(os.getppid(), signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "who":
                raise RuntimeError(os.getpid())
            case "leave others" | "leave others and hang":
                leave_others(path)
                if what.endswith("hang"):
                    threading.Event().wait()
        return Score(0.5, {"whole": 0.5})


def to_the_run(data: bytes) -> None:
    """Past the scorer's own means: what leads to the run is the one socket that is there."""
    there = {int(entry.name): entry for entry in Path("/proc/self/fd").iterdir()}
    (channel,) = (number for number, entry in there.items() if entry.is_symlink() and "socket:" in os.readlink(entry))
    os.write(channel, data)


def leave_others(pipe: str) -> None:
    """A child and an orphan, each with a session of its own; all hold this pipe, not empty when they are there."""
    with open(pipe, "w") as held:
        KEPT.append(os.dup(held.fileno()))
        subprocess.Popen(["sleep", "1000"], stdout=held, start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 1000 &"], stdout=held, check=True)
        held.write("x")


class OnceOnly(Misbehaving):
    """Its second scoring process cannot build it: the folder that its first one made is there."""

    def __init__(self, folder: str) -> None:
        os.mkdir(folder)


ready_made = Misbehaving()
not_a_task = 3
