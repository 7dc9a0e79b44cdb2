"""The holdings that are models: the policy's weights, and frozen models such as the reference. This file imports no
torch."""

from __future__ import annotations

from ebbtide.config.parallel import RolloutWeightsMode
from ebbtide.config.root import Config
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase

POLICY = "policy"
"""The name of the policy in `Config.forward_passes`; all other names are of frozen models."""
KNOWN_FROZEN: tuple[HoldingName, ...] = ("reference", "teacher", "teacher_head")
"""Frozen models that `memory.offload` may name also in a run that has none."""
SAMPLING_PHASES: tuple[Phase, ...] = ("generate", "evaluate")
"""The phases in which every rank samples on its own, and so needs all the weights."""


def weights_holding(gathered_by: RolloutWeightsMode | None = None) -> HoldingSpec:
    """The policy's weights, which never move. `gathered_by`: how ranks gather them to sample, where they are
    sharded."""
    cells = dict.fromkeys(SAMPLING_PHASES, gathered_by) if gathered_by is not None else {}
    needed = frozenset({"generate", "logprob", "train", "step", "save", "evaluate"})
    return HoldingSpec("weights", needed, movable=False, cells=cells)


def frozen_holdings(config: Config) -> list[HoldingSpec]:
    """The frozen models of an algorithm: each is needed in the phases in which it computes log-probs."""
    phases: dict[HoldingName, set[Phase]] = {}
    for phase, models in config.forward_passes.items():
        for model in models:
            if model != POLICY:
                phases.setdefault(model, set()).add(phase)
    found = [HoldingSpec(name, frozenset(needed), frozen=True) for name, needed in phases.items()]
    for name in config.frozen_models:  # losses over the vocabulary compute with its head
        found.append(HoldingSpec(head_of(name), frozenset({*phases.get(name, ()), "train"}), frozen=True))
    return found


def head_of(model: HoldingName) -> HoldingName:
    """The holding that is the matrix of a frozen model's output head."""
    return f"{model}_head"
