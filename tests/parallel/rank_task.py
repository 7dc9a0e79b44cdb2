"""Tasks that end one rank: as a run begins, or in the middle of a step."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

from ebbtide.tasks.builtin import DigitsTask
from ebbtide.tasks.task import Problem, Problems, Score


def _has_had_enough(*_: object) -> None:
    raise RuntimeError("rank 1 has had enough")


def _raise_once_tried() -> None:
    """In the first pass of a step: before it, the engine is tried, and what it raises there is a refusal."""
    from ebbtide.rollout.paged.engine import PagedEngine
    from ebbtide.rollout.paged.session import Session

    plain = PagedEngine.probing

    @contextmanager
    def trying(engine: PagedEngine):
        with plain(engine):
            yield
        Session._collect = _has_had_enough

    PagedEngine.probing = trying


class Ends(DigitsTask):
    def __init__(self, how: str) -> None:
        super().__init__(size=8, held_out=0, seed=0, reverse=False, digits=3)
        self.how = how

    def problems(self) -> Problems:
        if os.environ.get("RANK") == "1":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "aborts":
                os.abort()
            if self.how == "raises in a pass":
                _raise_once_tried()
                return super().problems()
            raise RuntimeError("rank 1 has had enough")
        return super().problems()


class Waits(DigitsTask):
    """For ever, as a run begins: rank 0 when rank 1 does. `deaf` ones hear no signal."""

    def __init__(self, pipe: str, deaf: list[int]) -> None:
        super().__init__(size=8, held_out=0, seed=0, reverse=False, digits=3)
        self.pipe, self.deaf = Path(pipe), deaf

    def problems(self) -> Problems:
        rank = int(os.environ["RANK"])
        if rank in self.deaf:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        if rank == 1:
            self.pipe.write_text("it does")
        else:
            os.write(1, f"the other waits: {self.pipe.read_text()}\n".encode())  # past what shows progress there
        threading.Event().wait()
        raise AssertionError("nobody sets it")


class LosesAnActor(DigitsTask):
    """Once, when two steps are done, what keeps rank 1 is killed while that rank scores."""

    def __init__(self, run: str, mark: str | None) -> None:
        super().__init__(size=40, held_out=0, seed=0, reverse=False, digits=4)
        self.metrics, self.mark = Path(run) / "metrics.jsonl", mark

    def score(self, problem: Problem, completion: str) -> Score:
        due = self.mark is not None and os.environ.get("RANK") == "1" and self.metrics.read_text().count("\n") == 2
        if due and not Path(self.mark).exists():
            Path(self.mark).touch()
            process = os.getpid()
            while not Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::RankActor"):
                process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
            os.kill(process, signal.SIGKILL)
        return super().score(problem, completion)
