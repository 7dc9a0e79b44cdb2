"""Frozen models: how much of them is where, and when they are loaded."""

from types import SimpleNamespace

import pytest
import torch

import ebbtide.worker
from conftest import TINY
from ebbtide.checkpoint.initial_model import load_frozen
from ebbtide.config.model import ModelConfig
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.planner.holdings import plan_holdings
from ebbtide.policy.frozen import FrozenModel
from ebbtide.policy.model_costs import frozen_size
from ebbtide.worker import Worker
from example_runs import DATA, config_of

CPU = torch.device("cpu")
TEACHER = {**TINY["model"]["scratch"], "hidden": 64, "heads": 1, "kv_heads": 1, "mlp": 64, "layers": 3}


def distill(**changes):
    return config_of("distill", {"data": {"train": "x", **DATA}, "teacher.scratch": TEACHER, **changes})


class Replicated(Comm):
    """A rank of a mesh that only replicates: it has the whole model."""

    mesh = object()  # type: ignore[assignment]


@pytest.mark.parametrize("comm", [Comm(), Replicated()], ids=["one rank", "replicas"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_what_the_plan_says(comm, tied) -> None:
    config = distill(**{"teacher.scratch": {**TEACHER, "tied": tied}})
    teacher = load_frozen(config, config.teacher, CPU)
    parameters = sum(weight.numel() for weight in teacher.model.parameters())
    with Residency(plan_holdings(config), CPU) as residency:
        FrozenModel("teacher", teacher, config, load_model(config), residency, comm)
        held = residency.holdings()
    planned = frozen_size(parameters, teacher.model.get_output_embeddings().weight.numel(), comm.shards, 4)
    assert held["teacher_head"].device == 4 * planned.head
    assert held["teacher"].device == 4 * planned.parameters  # of these shapes no bucket has gaps


@pytest.mark.parametrize("preset", ["keep", "lean"])
@pytest.mark.parametrize("algorithm", ["distill", "dpo"])
def test_frozen_models_make_room_before_the_optimizer_is_built(monkeypatch, algorithm, preset) -> None:
    """The first phase of distillation on samples is generate, which needs no teacher."""
    seen: list[dict[str, int]] = []

    class Built(ebbtide.worker.AdamW):
        def __init__(self, parameters, config, residency, *more) -> None:
            seen.append({name: size.device for name, size in residency.holdings().items()})
            super().__init__(parameters, config, residency, *more)

    monkeypatch.setattr("ebbtide.worker.AdamW", Built)
    config = distill(**{"data": None, "task": TINY["task"], "rollout": TINY["rollout"], "memory.preset": preset})
    frozen = ["teacher", "teacher_head"]
    if algorithm == "dpo":
        pairs = {"data": {"train": "x", **DATA}, "loss.reference": "each_step", "memory.preset": "keep"}
        config, frozen = config_of("dpo", pairs), ["reference"]
    with Worker(config) as worker:
        (there,) = seen
        away = preset == "lean" and algorithm == "distill"
        assert [there[name] == 0 for name in frozen] == [away] * len(frozen)
        with worker.phase(config.cycle[0]):
            pass
        held = worker.residency.holdings()
        assert not any(held[name].device for name in frozen if away)
        left = sum(size.host for name, size in held.items() if name not in frozen)
        assert worker.residency.meter.last.moved.bytes_out == left  # what moved at the start is not of the first phase


@pytest.mark.parametrize(("model", "wanted"), [({"scratch": TEACHER}, "cuda"), ({"path": "a/b"}, "cpu")])
def test_a_new_frozen_model_is_initialised_on_the_device_and_returned_on_the_host(monkeypatch, model, wanted) -> None:
    began: list[str] = []

    def load(config, device):
        began.append(device.type)
        assert config.model.path == model.get("path")
        return SimpleNamespace(model=torch.nn.Linear(2, 2, device="meta" if device.type == "cuda" else "cpu"))

    monkeypatch.setattr("ebbtide.checkpoint.initial_model.load_initial", load)
    monkeypatch.setattr(torch.nn.Linear, "to", lambda linear, place: began.append(f"to {place}"))
    load_frozen(distill(), ModelConfig.model_validate(model), torch.device("cuda"))
    assert began == [wanted, "to cpu"]
