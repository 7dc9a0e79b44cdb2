"""A task whose scorer does what its completion says: hang, die, raise, return nonsense. Imported by scoring's worker processes."""

import multiprocessing
import os
import signal
import subprocess
import threading

from ebbtide.tasks.task import Problem, Problems, Score, ask


class Misbehaving:
    def problems(self) -> Problems:
        return Problems([Problem(ask("p"), i) for i in range(4)], [])

    def score(self, problem: Problem, completion: str) -> Score:
        match completion:
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(3)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise RuntimeError("no idea")
            case "nan":
                return Score(float("nan"))
            case "nan part":
                return Score(1.0, {"part": float("inf")})
            case "print":
                print("a scorer's chatter")
            case "child":
                subprocess.run(["sleep", "1000"], check=False)
            case "fork":
                if os.fork() == 0:
                    raise OSError("what was to run in the child is not there")
            case "nothing":
                return None  # type: ignore[return-value]
        return Score(0.5, {"whole": 0.5})


class OnceOnly(Misbehaving):
    """Its second worker process cannot build it: the folder that its first one made is there."""

    def __init__(self, folder: str) -> None:
        if multiprocessing.parent_process() is not None:
            os.mkdir(folder)


ready_made = Misbehaving()
not_a_task = 3
