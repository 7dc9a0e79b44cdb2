"""What forwards and backwards cost on one rank: those of train, and forwards without gradient. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from ebbtide.config.memory import ActivationsConfig
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.memory.costs import HoldingBytes, PhaseCost, PhaseCosts, PlannedRun, Seconds
from ebbtide.memory.plan import HoldingName, HoldingSpec, Phase
from ebbtide.model.quantized_sizes import head_scratch_bytes, scratch_bytes
from ebbtide.model.shape import Shape
from ebbtide.model.workload import MicroBatchSize, Workload
from ebbtide.optim.costs import CPU_CHUNK, grad_bytes
from ebbtide.parallel.costs import GATHERED, CommTime
from ebbtide.parallel.rank_model import RankModel
from ebbtide.policy import activation_costs, divergence_costs, fused_costs, head_costs, traced_costs
from ebbtide.policy.activation_costs import (
    ACTIVATIONS,
    LINK_SHARE,
    PROBE_TOKENS,
    ActivationBytes,
    ActivationPolicy,
    offload_bytes,
    probe_length,
    recomputes_whole_block,
)
from ebbtide.policy.compute_costs import FusedSpeed, Speed
from ebbtide.policy.model_costs import POLICY, FrozenShape

ROWS = (ACTIVATIONS.name, head_costs.LOGITS.name, GATHERED.name)
"""The rows of a forward."""

Head = Literal["logprobs", "hidden", "divergence"]
"""What a forward computes of each target: its log-prob, only the hidden state before it, or the divergence of its
distribution from those of frozen models."""


class ActivationCosts(Protocol):
    """The activations of transformers' own blocks (activation_costs.py) or of fused ones (fused_costs.py)."""

    def activation_bytes(
        self, shape: Shape, itemsize: int, choice: ActivationPolicy, keep_last: int
    ) -> ActivationBytes: ...

    def resolve_policy(
        self, config: ActivationsConfig, shape: Shape, itemsize: int, carried: float, *, gated: bool = True
    ) -> ActivationPolicy: ...

    def activation_options(self, shape: Shape, balanced: ActivationPolicy) -> list[dict[str, Any]]: ...


class TrainCosts:
    """The forwards and backwards of one rank."""

    def __init__(self, rank: RankModel, frozen: Mapping[HoldingName, FrozenShape] | None = None) -> None:
        """`frozen`: the shapes of frozen models that are not the policy's."""
        self._rank = rank
        self._shape, self._sharing, self._gathers, self._itemsize = (
            rank.tp_shape,
            rank.mesh,
            rank.gathers,
            rank.itemsize,
        )
        fused = fused_costs.can_fuse(self._shape, rank.itemsize, rank.device_type, rank.mesh.tensor)
        self._saves: ActivationCosts = fused_costs if fused else activation_costs
        speed: type[Speed] = FusedSpeed if fused else Speed
        if self._shape.is_traced:
            self._saves, speed = traced_costs, traced_costs.TracedSpeed
        self._speed = speed(self._shape, rank.machine.rates, rank.itemsize)
        self._frozen = {
            name: TrainCosts(
                RankModel(
                    shape,
                    rank.machine,
                    itemsize=itemsize,
                    on_cpu=rank.device_type == "cpu",
                    mesh=rank.mesh,
                )
            )
            for name, (shape, itemsize) in (frozen or {}).items()
        }
        # Of the weights of all models whose logits a divergence compares.
        self._itemsizes = rank.itemsize + sum(costs._itemsize for costs in self._frozen.values())
        self._resolved: tuple[Config, ActivationPolicy] | None = None
        # Caches of what the tried configs have in common.
        self._forward_cache: dict[tuple[int, Workload, Head], Seconds] = {}
        self._update_cache: dict[tuple[int, int, Workload, ActivationPolicy, int, float, Head], Seconds] = {}

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        return [*divergence_costs.hidden_holdings(config), ACTIVATIONS, head_costs.LOGITS]

    def sizes(self, config: Config, rehearsal: Rehearsal | None) -> HoldingBytes:
        return HoldingBytes({})

    def add_costs(self, run: PlannedRun, phases: PhaseCosts) -> None:
        """Forwards without gradient in the phases of a step that have some; in a rehearsal also in train. Those of an
        evaluation are added by `add_evaluation`."""
        config, work = run.config, run.work
        for phase in config.cycle:
            phases[phase].device |= self._hidden_rows(config, work, phase)
            self._add_forwards(config, work, phase, phases[phase])
        if run.rehearsal is not None:
            self._add_forward(config, work, phases["train"], _policy_head(config, "train"), times=config.train.epochs)
        elif "train" in phases:
            self._add_train(run, phases["train"])

    def add_evaluation(self, run: PlannedRun, phase: PhaseCost) -> None:
        """Adds the forwards over held-out data. Hidden states of no more sequences than a step has are stored at a
        time."""
        held_out = replace(run.work, prompts=run.config.held_out_examples, trained=None)
        smaller = min(held_out, run.work, key=lambda work: work.sequences)
        phase.device |= self._hidden_rows(run.config, smaller, "evaluate")
        self._add_forwards(run.config, held_out, "evaluate", phase)

    def _hidden_rows(self, config: Config, work: Workload, phase: Phase) -> dict[HoldingName, int]:
        """The bytes of frozen models' hidden states, in the phases in which there are some."""
        existing = {spec.name for spec in divergence_costs.hidden_holdings(config) if phase in (spec.exists_in or ())}
        return {
            row: divergence_costs.hidden_bytes(config, work, costs._shape, costs._itemsize, self._sharing.data)
            for name, costs in self._frozen.items()
            if (row := divergence_costs.hidden_of(name)) in existing
        }

    def _add_forwards(self, config: Config, work: Workload, name: Phase, phase: PhaseCost) -> None:
        """Adds a forward of each model that computes in this phase, the policy's in evaluation with its loss."""
        for model in config.forward_passes.get(name, ()):
            if model == POLICY:
                self._add_forward(config, work, phase, _policy_head(config, name))
            else:
                head: Head = "hidden" if model in config.frozen_models and config.frozen_heads_in else "logprobs"
                self._frozen.get(model, self)._add_forward(config, work, phase, head)

    def _add_forward(self, config: Config, work: Workload, phase: PhaseCost, head: Head, times: int = 1) -> None:
        """Adds so many forwards over all sequences. Of several models in a phase, the one that needs the most
        counts."""
        rows = self._forward_rows(config, work, head)
        if sum(rows.values()) > sum(phase.device.get(name, 0) for name in ROWS):
            for name in ROWS:
                phase.device.pop(name, None)
            phase.device |= rows
        phase.add_seconds(times, self._forward_seconds(config.train.microbatch_tokens, work, head))

    def _add_train(self, run: PlannedRun, phase: PhaseCost) -> None:
        config, work, train, keep_last = run.config, run.work, run.config.train, run.config.memory.activations.keep_last
        choice = self.resolve_activations(config)
        self._set_train(config, work, choice, phase)
        grads_leaving = config.optimizer.cpu_share if config.optimizer.overlap else 0.0
        update = self._update_seconds(
            train.microbatch_tokens,
            train.minibatches,
            work,
            choice,
            keep_last,
            grads_leaving,
            _policy_head(config, "train"),
        )
        phase.add_seconds(run.updates, update)
        packed = work.pack(train.microbatch_tokens, train.minibatches, self._sharing.data)
        offloaded = self._saves.activation_bytes(self._shape, self._itemsize, choice, keep_last).offloaded
        moved = 2 * offloaded * sum(count * part.tokens for part, count in packed.parts)
        phase.moved += run.updates * round(moved)

    def resolve_activations(self, config: Config) -> ActivationPolicy:
        """What `memory.activations` resolves to on this machine, checked against the host link with a forward of the
        same length as in a run."""
        if self._resolved is not None and self._resolved[0] is config:
            return self._resolved[1]
        machine, tokens = self._rank.machine, min(PROBE_TOKENS, config.train.microbatch_tokens)
        length = probe_length(tokens, config.max_sequence_tokens)
        both, _ = self._speed.update(MicroBatchSize(tokens, tokens), length, ActivationPolicy(), 0)
        layers = max(1, self._shape.layers - config.memory.activations.keep_last)
        carried = LINK_SHARE * machine.rates.link_out * both / 3 / tokens / layers
        choice = self._saves.resolve_policy(
            config.memory.activations, self._shape, self._itemsize, carried, gated=machine.is_timed
        )
        self._resolved = config, choice
        return choice

    def activation_options(self, balanced: ActivationPolicy) -> list[dict[str, Any]]:
        """The settings of `memory.activations` that a plan tries; `balanced`: what that preset resolves to."""
        return self._saves.activation_options(self._shape, balanced)

    # Memory

    def _set_train(self, config: Config, work: Workload, choice: ActivationPolicy, phase: PhaseCost) -> None:
        """Sets the bytes of train: the maximum over all moments of all micro-batches. The first has no gradients
        before it, and the last may be smaller."""
        packed = work.pack(config.train.microbatch_tokens, config.train.minibatches, self._sharing.data)
        # Gradients that leave during the backward are on the device for a moment only.
        grads_leave = config.optimizer.overlap and config.optimizer.cpu_share == 1.0
        whole = 0 if grads_leave else phase.device["grads"]
        moments = self._memory_moments(config, packed.full, choice, 0, whole, grads_leave)
        for later in [packed.full] * (packed.count > 1) + ([packed.last] if packed.last else []):
            moments += self._memory_moments(config, later, choice, whole, whole, grads_leave)
        grads, activations, rest, gathered = max(moments, key=sum)
        phase.device |= {"grads": round(grads), "activations": round(activations), "logits": round(rest)}
        if gathered:
            phase.device["gathered"] = round(gathered)
        offloaded = self._saves.activation_bytes(
            self._shape, self._itemsize, choice, config.memory.activations.keep_last
        ).offloaded
        phase.host += round(offload_bytes(offloaded * config.train.microbatch_tokens)) if offloaded else 0

    def _memory_moments(
        self, config: Config, part: MicroBatchSize, choice: ActivationPolicy, before: int, whole: int, grads_leave: bool
    ) -> list[tuple[float, float, float, float]]:
        """(gradients, activations, the rest, gathered weights) in bytes, at these moments of a micro-batch: the output
        head, the norm before it, the backward of the last block, of the first block, and of the embedding."""
        shape, itemsize, hidden, tokens = self._shape, self._itemsize, self._shape.hidden, part.tokens
        saved = self._saves.activation_bytes(shape, itemsize, choice, config.memory.activations.keep_last)
        grad = grad_bytes(config.optimizer, itemsize)
        chunk = config.train.head_chunk_tokens
        diverges = _policy_head(config, "train") == "divergence"
        trained_head = shape.embedding if shape.lora is None else 0
        sizes = part.completion_tokens, shape.vocabulary, trained_head, chunk
        head = (
            divergence_costs.backward_bytes(*sizes, self._itemsizes, itemsize)
            if diverges
            else head_costs.backward_bytes(*sizes, itemsize)
        )
        head += head_scratch_bytes(shape, itemsize, gradients=min(chunk, part.completion_tokens))
        # A micro-batch has its part of the frozen models' hidden states once more, in one tensor.
        copied = part.completion_tokens * sum(one._itemsize * one._shape.hidden for one in self._frozen.values())
        # Gradients that leave are sent in chunks: one is being filled while another is copied.
        passing = (
            2 * grad * min(CPU_CHUNK, self._rank.trained)
            if config.optimizer.overlap and config.optimizer.cpu_share
            else 0
        )
        # The head's gradient is the first. If the head is tied to the embedding, autograd keeps it until the
        # embedding's own gradient is there, and only then accumulates or offloads it.
        head_grads = itemsize * trained_head if shape.tied or not (before or grads_leave) else 0
        early, late = before + head_grads + passing, max(before + head_grads, whole) + passing
        of_block, shard = shape.block_parameters, shape.block_shard(self._sharing.fsdp_size)
        if shape.lora is not None:
            of_block, shard = shape.adapter_shard(), shape.adapter_shard(self._sharing.fsdp_size)
        in_first = late - (grad * of_block if before == 0 and not grads_leave else 0)
        numbers = scratch_bytes(shape, itemsize)
        memory = [
            ((saved.blocks + saved.norm_saved) * tokens + 2 * itemsize * hidden * part.completion_tokens, head),
            ((saved.blocks + saved.in_final_norm) * tokens, 0),
            ((saved.blocks + saved.in_backward + itemsize * hidden) * tokens + numbers, 0),
            ((saved.first_block + saved.in_backward + itemsize * hidden) * tokens + numbers, 0),
            (itemsize * hidden * tokens, itemsize * trained_head),
        ]
        if diverges:
            memory = [(activations + copied, rest) for activations, rest in memory]
        if self._gathers is None:
            grads = (before, early, early, max(early, in_first), late)
            return [(grad, *rest, 0) for grad, rest in zip(grads, memory, strict=True)]
        # Gradients are sharded as soon as a block's are reduced; until then they are whole, the head's to the end.
        # While all blocks' activations still exist, a block's gradients need no more than what its backward has freed
        # by then (benchmarks/rank_memory.py).
        gathers = self._gathers
        own_grads = 2 * grad * shard if grads_leave else whole
        with_head = gathers.root_bytes + itemsize * trained_head
        # With ranks, one more tensor of the MLP's width was measured than without; why is not known.
        wide = 0 if shape.experts else itemsize * shape.mlp * tokens
        # Fused blocks copy gathered matrices that are multiplied with the same input side by side.
        beside = itemsize * shape.hidden * 2 * shape.mlp if self._saves is fused_costs else 0
        last = (
            with_head + gathers.block_bytes + gathers.prefetched_bytes + gathers.replica_reduced_bytes + wide + beside
        )
        first = last + itemsize * of_block + gathers.reduced_block_bytes
        gathered = (
            gathers.root_bytes + gathers.prefetched_bytes,
            with_head + gathers.prefetched_bytes,
            last,
            first,
            with_head + gathers.reduced_block_bytes,
        )
        grads = (before, before, before, own_grads, own_grads)
        found = [(grad, *rest, more) for grad, rest, more in zip(grads, memory, gathered, strict=True)]
        of_root = itemsize * shape.root_shard() if shape.lora is None else 0
        return [*found, (own_grads, 0, 0, of_root + gathers.reduced_root_bytes)]

    def _forward_rows(self, config: Config, work: Workload, kind: Head) -> dict[HoldingName, int]:
        """The bytes of forwards without gradient: the widest point of a block, or the head."""
        shape, itemsize = self._shape, self._itemsize
        part = work.pack(config.train.microbatch_tokens, ranks=self._sharing.data).full
        wide = shape.widest_layer
        gathered = 2 * shape.experts_per_token * shape.hidden
        block = itemsize * (3 * shape.hidden + 3 * wide + gathered) * part.tokens + scratch_bytes(shape, itemsize)
        chunk = config.train.head_chunk_tokens
        logits = 0.0
        if kind == "logprobs":
            logits = head_costs.forward_bytes(part.completion_tokens, shape.vocabulary, chunk, itemsize)
        elif kind == "divergence":
            logits = divergence_costs.forward_bytes(part.completion_tokens, shape.vocabulary, chunk, self._itemsizes)
        logits += head_scratch_bytes(shape, itemsize)
        head = itemsize * shape.hidden * (part.tokens + part.completion_tokens)
        root, inside = (
            (self._gathers.root_bytes + self._gathers.prefetched_bytes, self._gathers.block_bytes)
            if self._gathers is not None
            else (0, 0)
        )
        if block + inside > head + logits:
            rows = {"activations": round(block)}
        else:
            rows = {"activations": round(head), "logits": round(logits)}
            inside = 0
        return rows | {"gathered": root + inside} if root else rows

    # Seconds

    def _forward_seconds(self, tokens: int, work: Workload, head: Head) -> Seconds:
        """Seconds of a forward over all samples without gradient."""
        key = tokens, work, head
        if (found := self._forward_cache.get(key)) is None:
            length, packed = work.prompt_tokens + work.new_tokens, work.pack(tokens, ranks=self._sharing.data)
            seconds, communication, exposed = (
                sum(
                    count * (self._speed.forward(part.tokens, length) + self._head_seconds(part, head))
                    for part, count in packed.parts
                ),
                0.0,
                0.0,
            )
            if self._gathers is not None:
                tensor_parallel = sum(
                    count * self._gathers.tp_allreduce_seconds(part.tokens, backward=False)
                    for part, count in packed.parts
                )
                blocks = tensor_parallel + sum(
                    count * self._speed.forward(part.tokens, length) for part, count in packed.parts
                )
                gathered = self._gathers.forward_time(packed.passes, blocks / packed.passes)
                communication, exposed = tensor_parallel + gathered.seconds, tensor_parallel + gathered.exposed
            found = self._forward_cache[key] = Seconds(seconds + exposed, 0.0, communication, exposed)
        return found

    def _head_seconds(self, part: MicroBatchSize, head: Head) -> float:
        """Seconds of what a forward without gradient computes of the targets of a micro-batch."""
        if head == "hidden":
            return 0.0
        own = self._speed.head(part.completion_tokens, 1)
        return own if head == "logprobs" else own + self._divergence_seconds(part, backward=False)

    def _divergence_seconds(self, part: MicroBatchSize, *, backward: bool) -> float:
        """Seconds that a divergence takes in addition to the policy's own head, in a forward with or without its
        backward: the frozen models' logits, once and again in the backward, and the kernels that compare both."""
        predicted, copy = part.completion_tokens, self._rank.machine.rates.copy
        theirs = sum(one._speed.head(predicted, 2 if backward else 1) for one in self._frozen.values())
        read = divergence_costs.read_bytes(predicted, self._shape.vocabulary, self._itemsizes, backward=backward)
        return theirs + read / copy

    def _update_seconds(
        self,
        tokens: int,
        minibatches: int,
        work: Workload,
        choice: ActivationPolicy,
        keep_last: int,
        grads_leaving: float,
        head: Head,
    ) -> Seconds:
        """Seconds of the forwards and backwards of a minibatch."""
        key = tokens, minibatches, work, choice, keep_last, grads_leaving, head
        if (found := self._update_cache.get(key)) is None:
            length, packed = work.prompt_tokens + work.new_tokens, work.pack(tokens, minibatches, self._sharing.data)
            seconds, exposed, communication, exposed_communication = 0.0, 0.0, 0.0, 0.0
            for part, count in packed.parts:
                both, late = self._speed.update(part, length, choice, keep_last, grads_leaving)
                both += self._divergence_seconds(part, backward=True) if head == "divergence" else 0.0
                comm = self._update_communication(part, length, choice, both - late)
                seconds, exposed = seconds + count * (both + comm.exposed), exposed + count * late
                communication, exposed_communication = (
                    communication + count * comm.seconds,
                    exposed_communication + count * comm.exposed,
                )
            found = self._update_cache[key] = Seconds(seconds, exposed, communication, exposed_communication)
        return found

    def _update_communication(
        self, part: MicroBatchSize, length: float, choice: ActivationPolicy, compute: float
    ) -> CommTime:
        """Communication of a micro-batch's forward and backward, which take `compute` seconds by themselves."""
        if self._gathers is None:
            return CommTime(0.0, 0.0)
        recomputed = recomputes_whole_block(self._shape, choice)
        before, whole = (
            self._gathers.tp_allreduce_seconds(part.tokens, backward=backward, recompute=backward and recomputed)
            for backward in (False, True)
        )
        forward = self._speed.forward(part.tokens, length)
        backward = max(0.0, compute - forward - self._speed.head(part.completion_tokens, 4))
        found = self._gathers.update_time(forward + before, backward + whole - before)
        return CommTime(whole + found.seconds, whole + found.exposed)


def _policy_head(config: Config, phase: Phase) -> Head:
    """What the policy's forward computes of each target in a phase."""
    return "divergence" if phase in config.frozen_heads_in else "logprobs"
