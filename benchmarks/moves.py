"""Moving 20 GB of fp32 optimizer state out and in, and a GRPO step with the optimizer away in generate and logprob.

    python benchmarks/moves.py

Beside it, in the same process: the pinned-copy rate of this machine, and the usual way, `.to()` tensor by tensor.
The model has the Qwen3-1.7B shape with random weights. The step runs in deterministic mode under `keep`, under
`keep` again, and under the moving plan; the second and third are compared with the first bit by bit: the second is
the control that says whether the machine repeats itself at all.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Row, save, seconds

from ebbtide.algorithms.loop import train
from ebbtide.config import load
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.buckets import allocate_buckets
from ebbtide.memory.plan import build_plan
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.optim.costs import optimizer_holdings
from ebbtide.report.report import Report

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
AWAY = {"generate": ["moments", "master", "grads"], "logprob": ["moments", "master"]}
GB = 1e9


def pinned_rate() -> tuple[float, float]:
    """GB/s of one large pinned copy, out and in."""
    size = 4 * 2**30
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    out = seconds(lambda: host.copy_(device, non_blocking=True))
    back = seconds(lambda: device.copy_(host, non_blocking=True))
    return size / out / GB, size / back / GB


def tensor_by_tensor(shapes: list[torch.Size]) -> tuple[float, float, int]:
    """Seconds out and in with `.to()`, as policy workers commonly do it, for master and both moments of each
    parameter."""
    state = [torch.ones(shape, device="cuda") for shape in shapes for _ in range(3)]
    size = sum(tensor.nbytes for tensor in state)

    def move(where: str) -> None:
        for number in range(len(state)):
            state[number] = state[number].to(where)

    out = seconds(lambda: move("cpu"), repeats=1, warm_up=0)
    back = seconds(lambda: move("cuda"), repeats=1, warm_up=0)
    return out, back, size


def moved(rows: list[Row]) -> None:
    config = load(CONFIG)
    model = load_model(config).model
    shapes = [parameter.shape for parameter in model.parameters()]
    rate_out, rate_in = pinned_rate()
    rows += [Row("pinned copy", "out", rate_out, "GB/s"), Row("pinned copy", "in", rate_in, "GB/s")]

    base_out, base_in, size = tensor_by_tensor(shapes)
    rows += [
        Row("tensor by tensor .to()", "out", size / base_out / GB, "GB/s"),
        Row("tensor by tensor .to()", "in", size / base_in / GB, "GB/s"),
    ]

    holdings = optimizer_holdings(OptimizerConfig())
    plan = build_plan(MemoryConfig(preset="lean"), holdings, ["generate", "train", "step"])
    residency = Residency(plan, torch.device("cuda", 0))
    residency.register("master", allocate_buckets(shapes, torch.float32, residency.device)[0])
    residency.register(
        "moments", [flat for _ in range(2) for flat in allocate_buckets(shapes, torch.float32, residency.device)[0]]
    )
    pinning = seconds(residency.pin, repeats=1, warm_up=0)
    held = residency.holdings()
    bytes_held = held["master"].device + held["moments"].device
    before = torch.cuda.memory_allocated()
    outs, ins, left = [], [], []

    def fetch() -> None:
        residency.enter("step")
        residency.need("moments")

    for _ in range(6):
        outs.append(seconds(lambda: residency.enter("generate"), repeats=1, warm_up=0))
        left.append(before - torch.cuda.memory_allocated())
        assert {residency.holdings()[name].device for name in ("master", "moments")} == {0}
        ins.append(seconds(fetch, repeats=1, warm_up=0))
    out, back = sorted(outs[1:])[2], sorted(ins[1:])[2]
    rows += [
        Row("ebbtide", "state", bytes_held / GB, "GB"),
        Row("ebbtide", "out", bytes_held / out / GB, "GB/s"),
        Row("ebbtide", "in", bytes_held / back / GB, "GB/s"),
        Row("ebbtide", "out, of the pinned rate", bytes_held / out / GB / rate_out * 100, "%"),
        Row("ebbtide", "in, of the pinned rate", bytes_held / back / GB / rate_in * 100, "%"),
        Row("ebbtide", "out, times .to()", base_out / size / (out / bytes_held), "x"),
        Row("ebbtide", "in, times .to()", base_in / size / (back / bytes_held), "x"),
        Row("ebbtide", "memory given back, off by", max(abs(bytes_held - given) for given in left) / 2**20, "MiB"),
        Row("ebbtide", "pinning, once", pinning, "s"),
        Row("ebbtide", "host memory beyond the state", (residency.arena.bytes - bytes_held) / 2**20, "MiB"),
    ]
    residency.__exit__()


def run_steps(
    away: dict[str, list[str]], steps: int
) -> tuple[list[dict[str, float]], list[str], dict[str, torch.Tensor]]:
    """(metrics of each step, rollouts, weights at the end) of a run in deterministic mode."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"run.folder={folder}/run",
            f"train.steps={steps}",
            "deterministic=true",
            f"memory.offload={json.dumps(away)}",
        ]
        # A reward that differs within groups, so that the updates are not zero.
        options += ["task.builtin=null", "task.python.object=varied_task:Varied", "report.samples_every=0"]
        config = load(CONFIG, options)
        with Report(config, "moves") as report:
            policy = train(config, report)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        rollouts = (Path(folder) / "run" / "rollouts.jsonl").read_text().splitlines()
        return lines, rollouts, {key: value.cpu() for key, value in policy.model.state_dict().items()}


def stepped(rows: list[Row], steps: int = 3) -> None:
    ends = {}
    for name, away in (("keep", {}), ("keep, again", {}), ("optimizer away", AWAY)):
        ends[name] = run_steps(away, steps)
        last = ends[name][0][-1]
        rows += [
            Row(f"GRPO step, {name}", "seconds", last["seconds"], "s"),
            Row(f"GRPO step, {name}", "generate", last["seconds/generate"], "s"),
            Row(f"GRPO step, {name}", "train", last["seconds/train"], "s"),
            Row(f"GRPO step, {name}", "step", last["seconds/step"], "s"),
            Row(f"GRPO step, {name}", "moved", last["moved_gib"], "GiB"),
            Row(f"GRPO step, {name}", "exposed", last["seconds_exposed"], "s"),
            Row(f"GRPO step, {name}", "exposed, of the step", last["seconds_exposed"] / last["seconds"] * 100, "%"),
            Row(f"GRPO step, {name}", "peak in generate", last["peak_gib/generate"], "GiB"),
            Row(f"GRPO step, {name}", "peak in train", last["peak_gib/train"], "GiB"),
        ]
    for name in ("keep, again", "optimizer away"):
        rows.append(
            Row(
                f"GRPO steps, {name} = keep", "identical to the bit", float(same(ends["keep"], ends[name])), "(1 = yes)"
            )
        )


def same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    """Whether two runs are identical; says where they part, in the order in which a run makes things."""
    for (number, mine), theirs in zip(enumerate(one[0], start=1), other[0], strict=True):
        spoken = [[line for line in run[1] if json.loads(line)["step"] == number] for run in (one, other)]
        differing = sum(a != b for a, b in zip(*spoken, strict=True))
        figures = [key for key in ("mismatch", "loss", "entropy", "grad_norm") if mine[key] != theirs[key]]
        if differing or figures:
            print(
                f"the runs part at step {number}: {differing} of {len(spoken[0])} rollouts differ, and the figures"
                f" {figures}"
            )
            return False
    apart = [key for key in one[2] if not torch.equal(one[2][key], other[2][key])]
    if apart:
        print(
            f"the runs part after the last step: {len(apart)} of {len(one[2])} weights differ, the first of them"
            f" {apart[0]}"
        )
    return not apart


if __name__ == "__main__":
    found: list[Row] = []
    moved(found)
    stepped(found)
    save("moves", found)
