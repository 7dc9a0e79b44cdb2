"""How long a checkpoint holds up the loop, on the Qwen3-1.7B shape with exact fp32 state, against torch.save and
plain torch.distributed.checkpoint.

    python benchmarks/checkpoint.py FOLDER [KEY=VALUE]...

FOLDER is where the files go and are removed from again; all ways write there. In memory (such as /dev/shm) it is the
fastest disk there can be, which favours the ways that wait for it. The same state, 12 bytes a parameter on the
device, is written by all; Ebbtide's also syncs and digests every file.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import Row, save

from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.state import SAVED_HOLDINGS
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config import load
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.loss import LossConfig
from ebbtide.policy.datum import trajectory
from ebbtide.policy.losses import build_loss
from ebbtide.tasks.sampler import Sampler
from ebbtide.worker import Worker

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b-sft.yaml")
MODES = {"device": [], "cpu": ["optimizer.place=cpu"], "streamed": ["optimizer.place=streamed"]}
GB = 1e9


class Run:
    """A worker in a mode, after a step."""

    def __init__(self, worker: Worker) -> None:
        self.policy, self.residency, self._worker = worker.policy, worker.residency, worker
        worker.track(Sampler([0], 0))
        assert worker.state is not None
        self.state = worker.state
        generator = torch.Generator().manual_seed(0)
        self.sequences = [
            trajectory(tokens[:126], tokens[126:], [-5.0] * 256, advantage=float(number % 2 * 2 - 1), weight=1e-4)
            for number, tokens in enumerate(torch.randint(200, (32, 382), generator=generator).tolist())
        ]
        self.step()

    def step(self) -> tuple[float, float]:
        """(seconds of forward and backward, of the optimizer's step)."""
        start = _now()
        self._worker.forward_backward(self.sequences, build_loss(LossConfig()))
        middle = _now()
        self._worker.optim_step(1e-6)
        return middle - start, _now() - middle


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    start = _now()
    work()
    return _now() - start


@contextmanager
def run(options: list[str]) -> Iterator[Run]:
    with Worker(load(CONFIG, options)) as worker:
        yield Run(worker)


def ours(name: str, made: Run, folder: Path) -> list[Row]:
    held = made.residency.holdings()
    on_device = sum(held[holding].device for holding in SAVED_HOLDINGS if holding in held)
    link = on_device / made.residency.mover.measure_rate_out() if torch.cuda.is_available() else 0.0
    alone = [made.step() for _ in range(3)][-1]
    blocked = []
    for _ in range(3):
        start = _now()
        snapshot = made.state.snapshot(1, copy=True)
        blocked.append(time.perf_counter() - start)
        snapshot.release()
    saver = Saver(CheckpointConfig(keep=1), folder, made.state, print)
    start = _now()
    saver.save(1, {})
    first = time.perf_counter() - start
    beside = made.step()
    saver.wait()
    there = time.perf_counter() - start
    saver.close()
    (saved,) = list_checkpoints(folder)
    checked = time.perf_counter()
    sound = saved.find_problem() is None
    print(f"{name}: verified in {time.perf_counter() - checked:.1f} s", flush=True)
    shutil.rmtree(folder)
    return [
        Row(name, "on the device", on_device / GB, "GB"),
        Row(name, "copied at link speed", link, "s"),
        Row(name, "loop blocked", statistics.median([*blocked, first]), "s"),
        Row(name, "until it is there", there, "s"),
        Row(name, "size", saved.bytes / GB, "GB"),
        Row(name, "verified", float(sound), "(1 = yes)"),
        Row(name, "forward and backward, alone", alone[0], "s"),
        Row(name, "forward and backward, beside the save", beside[0], "s"),
        Row(name, "step, alone", alone[1], "s"),
        Row(name, "step, beside the save", beside[1], "s"),
    ]


def plain(made: Run, folder: Path) -> Iterator[Row]:
    """The same tensors as they are on the device."""
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in made.policy.model.named_parameters()}
    for name in ("master", "moments"):
        tensors |= {
            f"{name}.{number}": tensor for number, tensor in enumerate(made.residency._holdings[name].tensors())
        }
    folder.mkdir()
    yield Row("torch.save", "loop blocked", timed(lambda: torch.save(tensors, folder / "state.pt")), "s")
    shutil.rmtree(folder)
    yield Row(
        "torch.distributed.checkpoint",
        "loop blocked",
        timed(lambda: dcp.save(tensors, checkpoint_id=folder, no_dist=True)),
        "s",
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    place, options = Path(sys.argv[1]) / "ebbtide-benchmark", sys.argv[2:]
    rows: list[Row] = []
    for mode, settings in MODES.items():
        with run([*settings, *options]) as made:
            rows += ours(f"state: {mode}", made, place)
            save("checkpoint", rows)
            if mode == "device":
                for row in plain(made, place):
                    rows.append(row)
                    save("checkpoint", rows)
    save("checkpoint", rows)
