"""How ranks shard a model and its work, what they gather of it, and the seconds of their communication: all-gathers,
reduce-scatters and all-reduces, hidden behind compute or exposed.

The numbers of collectives are those of FSDP2 and tensor parallelism in a run (tests compare them); their seconds are
computed, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import NamedTuple

from ebbtide.config.parallel import ParallelConfig, RolloutWeightsMode
from ebbtide.errors import UserError
from ebbtide.memory.plan import HoldingSpec
from ebbtide.model.shape import Shape
from ebbtide.system.machine import Links, Rates
from ebbtide.system.units import ceil_div

# The latency of a NCCL collective in seconds, by NCCL's own table (src/graph/tuning.cc: ring, Simple): its base, and
# for each step to another rank by NVLink, by PCIe, by the network.
BASE, NVLINK, PCIE, NETWORK = 8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6
# Host operations for each tensor that is all-gathered whole, and for each rank on top: fitted to 4, 8 and 64 ranks of
# torch's `fake` backend (benchmarks/rank_memory.py).
GATHER_OPS, GATHER_OPS_RANK = 32.0, 1.26
# Bytes of weights that are sent at once to ranks that only generate: this takes half a millisecond within a node, so
# that the latency of each message does not count.
WEIGHT_SYNC_BUCKET = 256 << 20
GATHERED = HoldingSpec("gathered", transient=True)
"""All-gathered weights, and gradients until they are reduced."""
REDUCED = 4  # bytes of a gradient element while ranks reduce it: float32 (parallel/fsdp.py)
# All-reduces of tensor parallelism per block. Forward: after attention and MLP; backward: for the inputs of queries,
# keys, values, gate and up.
ALLREDUCES_FORWARD, ALLREDUCES_BACKWARD = 2, 5


@dataclass(frozen=True)
class MeshShape:
    """The ranks of a run as a mesh of replicate x shard x tensor; tensor-parallel ranks are neighbours."""

    data: int = 1
    tensor: int = 1
    replicate: int = 1
    node: int = 1
    """The number of GPUs on a node."""

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on a node."""
        return min(self.size, self.node)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def fsdp_size(self) -> int:
        """The number of ranks over which FSDP shards a tensor."""
        return self.data // self.replicate

    @property
    def shards(self) -> int:
        """The number of shards of the model: by FSDP and by tensor parallelism."""
        return self.fsdp_size * self.tensor

    def summarize(self) -> str:
        sizes = f"data {self.data}, tensor {self.tensor}, replicate {self.replicate}"
        return f"{describe_ranks(self.size, self.shards)}, {self.ranks_per_node} on a node: {sizes}"


def describe_ranks(size: int, shards: int) -> str:
    """How so many ranks share a model, for the user."""
    parts = f"each with one part in {shards} of the model" if shards > 1 else "each with the whole model"
    return f"{size} ranks, {parts}"


def mesh_shape(parallel: ParallelConfig | None, size: int | None, node: int) -> MeshShape:
    """The mesh of a `parallel` section, for `size` ranks (None: as the section says) and `node` GPUs on a node."""
    parallel = parallel or ParallelConfig(gpus=1)
    size = size or parallel.ranks or (1 if parallel.rollout_gpus else None)
    if size is None:
        raise UserError("`parallel` does not say how many ranks train: set `parallel.gpus`")
    if size == 1:
        return MeshShape(node=node)
    return MeshShape(size // parallel.tensor, parallel.tensor, parallel.replicate, node)


class CommTime(NamedTuple):
    """The seconds of communication."""

    seconds: float
    exposed: float
    """The part of them for which compute waits."""


class RankGroup(NamedTuple):
    """The number of ranks in one collective."""

    size: int
    near: int
    """The number of them on one node."""


class GatherCosts:
    """The communication of one sharded model: the bytes of what is gathered, and seconds. `part` is the shape that a
    tensor-parallel rank computes with; `itemsize` is the bytes of a weight."""

    def __init__(self, shape: Shape, part: Shape, shared: MeshShape, links: Links, itemsize: int) -> None:
        self._shape, self._part, self._mesh, self._links, self._itemsize = shape, part, shared, links, itemsize
        shards, self._near_latency = shared.fsdp_size, NVLINK if links.has_nvlink else PCIE
        # FSDP pads every rank's shard to the size of the first when it is sent, so some of what is gathered may be
        # padding.
        block, adapters, root = part.block_shard(shards), part.adapter_shard(shards), part.root_shard(shards)
        self.block_bytes, self.root_bytes = shards * itemsize * (block + adapters), shards * itemsize * root
        # Gradients are those of what is trained: everything, or the blocks' adapters.
        trained = (block, root) if shape.lora is None else (adapters, 0)
        reduced = shards * (REDUCED if shared.data > 1 else itemsize)
        self.reduced_block_bytes, self.reduced_root_bytes = reduced * trained[0], reduced * trained[1]
        self.replica_reduced_bytes = self.reduced_block_bytes // shards if shared.replicate > 1 else 0
        """The bytes of this rank's shard of a block's gradients while replicas all-reduce it."""
        self.prefetched_bytes = self.block_bytes if shards > 1 else 0
        """The bytes of the block after the one in use, which FSDP prefetches."""
        self._block_in, self._root_in = (
            self._all_gather(self._shard_ranks, self.block_bytes),
            self._all_gather(self._shard_ranks, self.root_bytes),
        )
        self._block_out = self._reduce_gradients(self.reduced_block_bytes)
        self._root_out = self._reduce_gradients(self.reduced_root_bytes) if self.reduced_root_bytes else 0.0

    # Groups of ranks

    def _group(self, size: int, stride: int) -> RankGroup:
        """A group of ranks whose numbers differ by `stride`."""
        return RankGroup(size, max(1, min(size, self._mesh.ranks_per_node // stride)))

    @cached_property
    def _tensor_ranks(self) -> RankGroup:
        return self._group(self._mesh.tensor, 1)

    @cached_property
    def _shard_ranks(self) -> RankGroup:
        return self._group(self._mesh.fsdp_size, self._mesh.tensor)

    @cached_property
    def _replica_ranks(self) -> RankGroup:
        return self._group(self._mesh.replicate, self._mesh.tensor * self._mesh.fsdp_size)

    # Seconds of one collective, as NCCL runs it: rings, and trees for all-reduces where these are faster

    def _rate(self, group: RankGroup) -> float:
        """The bandwidth of a group. All ranks of a node use its network at once, each for its own group, so a group
        has the share of its members."""
        near, far = self._links.near, group.near * self._links.far
        return near if group.size == group.near else min(near, far)

    def _all_gather(self, group: RankGroup, size: float) -> float:
        """The seconds of an all-gather to, or a reduce-scatter from, `size` bytes."""
        if group.size == 1:
            return 0.0
        nodes = ceil_div(group.size, group.near)
        steps = (group.size - nodes) * self._near_latency + (nodes - 1) * NETWORK
        return BASE + steps + (group.size - 1) / group.size * size / self._rate(group)

    def _all_reduce(self, group: RankGroup, size: float) -> float:
        """The seconds of an all-reduce of `size` bytes."""
        if group.size == 1:
            return 0.0
        nodes = ceil_div(group.size, group.near)
        tree = BASE + 2 * ((group.near - 1) * self._near_latency + log2(nodes) * NETWORK) + 2 * size / self._rate(group)
        return min(2 * self._all_gather(group, size), tree)

    def _reduce_gradients(self, size: float) -> float:
        """The seconds to reduce-scatter `size` bytes of gradients among shards and all-reduce them among replicas."""
        return self._all_gather(self._shard_ranks, size) + self._all_reduce(
            self._replica_ranks, size / self._mesh.fsdp_size
        )

    # Forward and backward passes

    def tp_allreduce_seconds(self, tokens: float, *, backward: bool, recompute: bool = False) -> float:
        """The seconds of tensor parallelism's all-reduces in a pass over so many tokens; compute waits for each. With
        `recompute` the blocks' forwards are recomputed in the backward."""
        if self._mesh.tensor == 1:
            return 0.0
        shape, hidden = self._shape, self._itemsize * self._shape.hidden
        once = self._all_reduce(self._tensor_ranks, hidden * tokens)
        found = shape.layers * (ALLREDUCES_FORWARD * (1 + recompute) + ALLREDUCES_BACKWARD * backward) * once
        if shape.lora is not None and backward:  # The gradient of each adapter's replicated matrix.
            found += shape.layers * len(shape.adapters) * self._all_reduce(self._tensor_ranks, hidden * shape.lora.rank)
        return found

    def forward_time(self, passes: int, compute: float) -> CommTime:
        """The communication of so many forward passes without a backward, each with `compute` seconds in its blocks.
        Weights outside the blocks are gathered for the first pass and stay for the others."""
        if not passes:
            return CommTime(0.0, 0.0)
        blocks, each = self._shape.layers, self._block_in
        late = each + (blocks - 1) * max(0.0, each - compute / blocks)
        return CommTime(passes * blocks * each + self._root_in, passes * late + self._root_in)

    def update_time(self, forward: float, backward: float) -> CommTime:
        """The communication of a forward and a backward with so many seconds of compute in their blocks. Blocks are
        gathered for both, and their gradients reduced behind the next block's backward."""
        blocks, into, out = self._shape.layers, self._block_in, self._block_out
        late = into + (blocks - 1) * max(0.0, into - forward / blocks)
        # The first of these gathers is hidden behind the head's backward.
        late += (blocks - 1) * max(0.0, into + out - backward / blocks) + out
        ends = self._root_in + self._root_out
        return CommTime(blocks * (2 * into + out) + ends, late + ends)

    # Generation

    @cached_property
    def _sharded_parameters(self) -> tuple[int, int]:
        """The number of sharded parameters (of a block, outside the blocks). Replicated ones need no gathering to
        generate."""
        shape, ranks = self._shape, self._mesh.tensor
        block, part = (one.block_parameters + one.adapter_shard() for one in (shape, self._part))
        if self._mesh.fsdp_size > 1:
            return block, shape.root_shard()
        # This rank's part of a block is what is replicated, and one shard of what is sharded.
        return (block - part) * ranks // (ranks - 1) if ranks > 1 else 0, 0

    def gathered_bytes(self, mode: RolloutWeightsMode | None) -> int:
        """The bytes of gathered weights that a rank has in addition to its own shard while it generates: all of them,
        or with `layerwise` three blocks and one shard of a block (rollout/weights/layerwise.py)."""
        block, root = self._sharded_parameters
        if mode == "layerwise":
            return self._itemsize * (root + 3 * block + block // self._mesh.shards)
        shape = self._shape
        return self._itemsize * (shape.parameters + shape.adapter_parameters if root else shape.layers * block)

    def generate_time(self, mode: RolloutWeightsMode | None, passes: float, compute: float, rates: Rates) -> CommTime:
        """The communication of a generate phase of so many passes and `compute` seconds. What is gathered for the
        whole phase is gathered tensor by tensor before the first pass, and copied once more."""
        shape, (block, root) = self._shape, self._sharded_parameters
        if mode == "layerwise":
            once = shape.layers * self._all_gather(self._group(self._mesh.shards, 1), self._itemsize * block)
            before = self._all_gather_tensors(self._itemsize * root, 2 if shape.tied else 3, rates)
            return CommTime(before + passes * once, before + once / shape.layers + max(0.0, passes * once - compute))
        tensors = shape.tensor_count + (shape.trained_tensor_count if shape.lora is not None else 0)
        before = self._all_gather_tensors(self.gathered_bytes(mode), tensors, rates)
        return CommTime(before, before)

    def weight_sync_seconds(self, rates: Rates) -> float:
        """The seconds to gather what rollout workers are sent: all weights, or the adapters."""
        if (shape := self._shape).lora is None:
            return self.generate_time("gathered", 0, 0.0, rates).seconds
        return self._all_gather_tensors(self._itemsize * shape.adapter_parameters, shape.trained_tensor_count, rates)

    def _all_gather_tensors(self, size: int, tensors: int, rates: Rates) -> float:
        """The seconds to gather so many bytes in so many tensors, one after the other: limited by the links between
        GPUs, or by the host that launches the collectives."""
        if not size:
            return 0.0
        mean, shared = size / tensors, self._mesh
        sent = (
            self._all_gather(self._shard_ranks, mean / shared.tensor)
            + self._all_gather(self._tensor_ranks, mean)
            + 2 * mean / rates.copy
        )
        return tensors * max(sent, (GATHER_OPS + GATHER_OPS_RANK * shared.fsdp_size) / rates.host_op)
