"""The holdings that are models: the policy's weights, and frozen models such as the reference. This file imports no
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ebbtide.config.parallel import RolloutWeightsMode
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import HoldingBytes, PhaseCosts, PlannedRun
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase
from ebbtide.model.quantized_sizes import base_bytes, root_bytes
from ebbtide.model.shape import Shape
from ebbtide.parallel.costs import MeshShape
from ebbtide.parallel.rank_model import RankModel
from ebbtide.system.units import ceil_div

BASE: HoldingName = "base"
"""The row of a policy's frozen weights, beside adapters that are trained."""
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


def base_holding(gathered_by: RolloutWeightsMode | None = None) -> HoldingSpec:
    """The frozen weights of a policy with adapters, which are gathered as those are."""
    weights = weights_holding(gathered_by)
    return HoldingSpec(BASE, weights.needed_in, movable=False, frozen=True, cells=weights.cells)


def frozen_holdings(config: Config) -> list[HoldingSpec]:
    """The frozen models of an algorithm: each is needed in the phases in which it computes log-probs. A
    reference that is the base of new adapters is no model of its own."""
    phases: dict[HoldingName, set[Phase]] = {}
    for phase, models in config.forward_passes.items():
        for model in models:
            if model != POLICY and not (model == "reference" and config.reference_is_base):
                phases.setdefault(model, set()).add(phase)
    found = [HoldingSpec(name, frozenset(needed), frozen=True) for name, needed in phases.items()]
    for name in config.frozen_models:  # losses over the vocabulary compute with its head
        found.append(
            HoldingSpec(head_of(name), frozenset({*phases.get(name, ()), *config.frozen_heads_in}), frozen=True)
        )
    return found


def head_of(model: HoldingName) -> HoldingName:
    """The holding that is the matrix of a frozen model's output head."""
    return f"{model}_head"


class FrozenShape(NamedTuple):
    """The shape of a frozen model with an architecture of its own."""

    shape: Shape
    itemsize: int
    """Bytes of a weight."""


class FrozenSize(NamedTuple):
    """The parameters of a frozen model of another shape than the policy's, on one rank."""

    itemsize: int
    """Bytes of a parameter."""
    parameters: int
    """All of this rank's, with the head's matrix only where the model is sharded: every rank has that as a whole."""
    head: int
    """Those of the matrix of its output head."""


def frozen_bytes(
    config: Config, parameters: int, itemsize: int, others: Mapping[HoldingName, FrozenSize] | None = None
) -> dict[HoldingName, int]:
    """The bytes of each frozen model: of as many parameters as are trained here, or of those in `others`."""
    found = {spec.name: itemsize * parameters for spec in frozen_holdings(config)}
    for name, size in (others or {}).items():
        found |= {name: size.itemsize * size.parameters, head_of(name): size.itemsize * size.head}
    return found


def frozen_size(parameters: int, head: int, shards: int, itemsize: int) -> FrozenSize:
    """The size of a frozen model of so many parameters, with those of its head, among so many shards."""
    return FrozenSize(itemsize, ceil_div(parameters, shards) if shards > 1 else parameters - head, head)


def loading_bytes(shape: Shape, itemsize: int, mesh: MeshShape, frozen: Collection[FrozenShape]) -> int:
    """The bytes of a node's host memory while the models are loaded one after the other. Each rank loads a frozen model
    as a whole on the host, and so the policy, where that is sharded or quantized."""
    whole = (
        [itemsize * (shape.parameters + shape.adapter_parameters)] if mesh.shards > 1 or shape.base is not None else []
    )
    whole += [one.itemsize * one.shape.parameters for one in frozen]
    return mesh.ranks_per_node * max(whole, default=0)


class WeightsCosts:
    """The policy's weights on one rank. What they compute is in `policy/train_costs.py`."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        gathered_by = config.rollout_weights(shards)
        base = [base_holding(gathered_by)] if config.model.lora is not None else []
        return [weights_holding(gathered_by), *base]

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        rank = self._rank
        base = {BASE: base_bytes(rank.shape, rank.itemsize, rank.parameters)} if config.model.lora is not None else {}
        if config.memory.stream_base:  # Its blocks are a row of their own.
            base = {BASE: root_bytes(rank.shape, rank.itemsize)}
        return HoldingBytes({"weights": rank.itemsize * rank.trained, **base})

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """Weights cost nothing but their memory."""


class FrozenCosts:
    """The frozen models on one rank, sharded like the policy. Their forwards are in `policy/train_costs.py`."""

    def __init__(self, rank: RankModel, frozen: Mapping[HoldingName, FrozenShape] | None = None) -> None:
        """`frozen`: the shapes of models that have another one than the policy."""
        self._rank, self._frozen = rank, frozen or {}

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        return frozen_holdings(config)

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        mesh = self._rank.mesh
        others = {
            name: frozen_size(shape.parameters + shape.adapter_parameters, shape.embedding, mesh.shards, itemsize)
            for name, (shape, itemsize) in self._frozen.items()
        }
        return HoldingBytes(frozen_bytes(config, self._rank.trained, self._rank.itemsize, others))

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """Frozen weights cost nothing but their memory."""
