"""Predicts the device memory of forwards and backwards on one rank: of train, and of forwards without gradient."""

from __future__ import annotations

from ebbtide.config.root import Config
from ebbtide.model.shape import Shape
from ebbtide.optim.costs import CPU_CHUNK, grad_bytes
from ebbtide.parallel.costs import GatherCosts, MeshShape
from ebbtide.planner.prediction import PhaseCost
from ebbtide.planner.workload import MicroBatchSize, Workload
from ebbtide.policy import head_costs
from ebbtide.policy.activation_costs import ActivationPolicy, activation_bytes


class TrainMemory:
    """Predicts the bytes on one rank. `shape`: what the rank computes with (tensor parallelism); `gathers`: None on a
    single rank."""

    def __init__(self, shape: Shape, sharing: MeshShape, gathers: GatherCosts | None, itemsize: int) -> None:
        self._shape, self._sharing, self._gathers, self._itemsize = shape, sharing, gathers, itemsize

    def set_train(self, config: Config, work: Workload, choice: ActivationPolicy, phase: PhaseCost) -> None:
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
        offloaded = activation_bytes(self._shape, self._itemsize, choice, config.memory.activations.keep_last).offloaded
        phase.host += round(1.02 * offloaded * config.train.microbatch_tokens) if offloaded else 0

    def _memory_moments(
        self, config: Config, part: MicroBatchSize, choice: ActivationPolicy, before: int, whole: int, grads_leave: bool
    ) -> list[tuple[float, float, float, float]]:
        """(gradients, activations, the rest, gathered weights) in bytes, at these moments of a micro-batch: the output
        head, the norm before it, the backward of the last block, of the first block, and of the embedding."""
        shape, itemsize, hidden, tokens = self._shape, self._itemsize, self._shape.hidden, part.tokens
        saved = activation_bytes(shape, itemsize, choice, config.memory.activations.keep_last)
        grad = grad_bytes(config.optimizer, itemsize)
        chunk = config.train.head_chunk_tokens
        head = head_costs.backward_bytes(part.completion_tokens, shape.vocabulary, shape.embedding, chunk, itemsize)
        # Gradients that leave are sent in chunks: one is being filled while another is copied.
        passing = (
            2 * grad * min(CPU_CHUNK, shape.parameters)
            if config.optimizer.overlap and config.optimizer.cpu_share
            else 0
        )
        # The head's gradient is the first. If the head is tied to the embedding, autograd keeps it until the
        # embedding's own gradient is there, and only then accumulates or offloads it.
        head_grads = itemsize * shape.embedding if shape.tied or not (before or grads_leave) else 0
        early, late = before + head_grads + passing, max(before + head_grads, whole) + passing
        in_first = late - (grad * shape.block_parameters if before == 0 and not grads_leave else 0)
        norm_saved = (saved.in_final_norm - (16 + itemsize) * hidden) * tokens
        memory = [
            (saved.blocks * tokens + norm_saved + 2 * itemsize * hidden * part.completion_tokens, head),
            ((saved.blocks + saved.in_final_norm) * tokens, 0),
            ((saved.blocks + saved.in_backward + itemsize * hidden) * tokens, 0),
            ((saved.first_block + saved.in_backward + itemsize * hidden) * tokens, 0),
            (itemsize * hidden * tokens, itemsize * shape.embedding),
        ]
        if self._gathers is None:
            grads = (before, early, early, max(early, in_first), late)
            return [(grad, *rest, 0) for grad, rest in zip(grads, memory, strict=True)]
        # Gradients are sharded as soon as a block's are reduced; until then they are whole, the head's to the end.
        # While all blocks' activations still exist, a block's gradients need no more than what its backward has freed
        # by then (benchmarks/rank_memory.py).
        gathers = self._gathers
        own_grads = 2 * grad * shape.block_shard(self._sharing.fsdp_size) if grads_leave else whole
        with_head = gathers.root_bytes + itemsize * shape.embedding
        # With ranks, one more tensor of the MLP's width was measured than without; why is not known.
        wide = 0 if shape.experts else itemsize * shape.mlp * tokens
        last = with_head + gathers.block_bytes + gathers.prefetched_bytes + gathers.replica_reduced_bytes + wide
        first = last + itemsize * shape.block_parameters + gathers.reduced_block_bytes
        gathered = (
            gathers.root_bytes + gathers.prefetched_bytes,
            with_head + gathers.prefetched_bytes,
            last,
            first,
            with_head + gathers.reduced_block_bytes,
        )
        grads = (before, before, before, own_grads, own_grads)
        found = [(grad, *rest, more) for grad, rest, more in zip(grads, memory, gathered, strict=True)]
        return [*found, (own_grads, 0, 0, itemsize * shape.root_shard() + gathers.reduced_root_bytes)]

    def set_forward(self, config: Config, work: Workload, phase: PhaseCost) -> None:
        """Sets the bytes of forwards without gradient: the widest point of a block, or the head."""
        shape, itemsize = self._shape, self._itemsize
        part = work.pack(config.train.microbatch_tokens, ranks=self._sharing.data).full
        wide = widest_layer(shape)
        gathered = 2 * shape.experts_per_token * shape.hidden
        block = itemsize * (3 * shape.hidden + 3 * wide + gathered) * part.tokens
        chunk = config.train.head_chunk_tokens
        logits = head_costs.forward_bytes(part.completion_tokens, shape.vocabulary, chunk, itemsize)
        head = itemsize * shape.hidden * (part.tokens + part.completion_tokens)
        root, inside = (
            (self._gathers.root_bytes + self._gathers.prefetched_bytes, self._gathers.block_bytes)
            if self._gathers is not None
            else (0, 0)
        )
        if block + inside > head + logits:
            phase.device["activations"] = round(block)
        else:
            phase.device |= {"activations": round(head), "logits": round(logits)}
            inside = 0
        if root:
            phase.device["gathered"] = root + inside


def widest_layer(shape: Shape) -> int:
    """Numbers per token at the widest point of a block."""
    return max(shape.mlp * max(1, shape.experts_per_token), shape.dense_mlp)
