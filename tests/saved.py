"""A toy run whose state is saved and compared."""

from datetime import timedelta

import torch

from conftest import TINY
from ebbtide.checkpoint.state import RunState
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.parallel.group import Group
from ebbtide.tasks.sampler import Sampler
from patience import PATIENCE
from toy import state_of, trained


def made(**options):
    """(state, model, residency, optimizer) after three steps."""
    model, residency, optimizer, _ = trained(torch.bfloat16, steps=3, **options)
    residency.register("weights", list(model.parameters()))
    sampler = Sampler([1, 2, 3], seed=0)
    return (
        RunState(
            GrpoConfig.model_validate(TINY), model, optimizer, sampler, residency, Group(timedelta(seconds=PATIENCE))
        ),
        model,
        residency,
        optimizer,
    )


def contents(model, optimizer) -> dict[str, torch.Tensor]:
    moments, _ = state_of(optimizer)
    weights = {f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    shapes = {name: stored.region.size for name, stored in optimizer.state().items()}
    return weights | {f"optimizer.{name}": tensor.view(shapes[name]) for name, tensor in moments.items()}


def read(snapshot, names=None) -> dict[str, torch.Tensor]:
    found = {}
    for entry in snapshot.entries:
        if names is None or entry.name in names:
            found[entry.name] = entry.empty()
            snapshot.fill(entry.name, found[entry.name])
    return found


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
