"""How ranks share out a model and its work, what they gather of it, and the seconds that they talk: all-gathers, reduce-scatters and all-reduces, hidden behind compute or not.

Counts of collectives are those of FSDP2 and of tensor parallelism as a run has them (tests hold them against it); their seconds are computed, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import NamedTuple

from ebbtide.config.tree import Cluster, Gathering
from ebbtide.errors import UserError
from ebbtide.planner.machine import Links, Rates
from ebbtide.planner.shape import Shape

# Seconds that a collective of NCCL takes beside its bytes, by NCCL's own table (src/graph/tuning.cc: ring, Simple): once, and for each step to a rank by NVLink, by the bus, by the network.
ONCE, NVLINK, BUS, NETWORK = 8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6
# Operations of the host for each tensor that is gathered whole, and more for each rank: fitted to 4, 8 and 64 ranks that were not there (benchmarks/rank_memory.py).
GATHER_OPS, GATHER_OPS_RANK = 32.0, 1.26
SENT = (
    256 << 20
)  # bytes of weights that go at once to ranks that only generate: half a millisecond within a node, so that what each costs to start does not count
REDUCED = 4  # bytes of a gradient while ranks add it up: in float32 (cluster/shard.py)
JOINED, JOINED_BACK = 2, 5  # all-reduces of a block by tensor parallelism: after attention and MLP; for queries, keys, values, gate and up


@dataclass(frozen=True)
class Sharing:
    """Ranks as `cluster` has them: a mesh of replicate x shard x tensor, the last on neighbours."""

    data: int = 1
    tensor: int = 1
    replicate: int = 1
    node: int = 1
    """GPUs of a node."""

    @property
    def here(self) -> int:
        """Ranks of a node."""
        return min(self.size, self.node)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def shards(self) -> int:
        """Ranks that share out each row of a tensor."""
        return self.data // self.replicate

    @property
    def held(self) -> int:
        """A rank has about one part in so many of the model."""
        return self.shards * self.tensor

    def words(self) -> str:
        parts = f"each with one part in {self.held} of the model" if self.held > 1 else "each with the whole model"
        return f"{self.size} ranks, {parts}, {self.here} on a node: data {self.data}, tensor {self.tensor}, replicate {self.replicate}"


def sharing(cluster: Cluster | None, size: int | None, node: int) -> Sharing:
    """Of a `cluster` section: with `size` ranks, where they were started already, and so many GPUs on a node."""
    cluster = cluster or Cluster(gpus=1)
    size = size or cluster.ranks or (1 if cluster.rollout_gpus else None)
    if size is None:
        raise UserError("`cluster` does not say how many ranks there are: set `cluster.gpus`")
    if size == 1:
        return Sharing(node=node)
    return Sharing(size // cluster.tensor, cluster.tensor, cluster.replicate, node)


class Talk(NamedTuple):
    """Seconds of collectives."""

    seconds: float
    exposed: float
    """Of those, compute waits for."""


class Group(NamedTuple):
    """Ranks of one collective."""

    size: int
    near: int
    """Of them, on a node."""


class Gathers:
    """One model shared out among ranks: bytes of what is gathered, and seconds. `part` is what tensor parallelism leaves of the model for a rank."""

    def __init__(self, shape: Shape, part: Shape, shared: Sharing, links: Links, each: int) -> None:
        self._shape, self._part, self._shared, self._links, self._each = shape, part, shared, links, each
        shards, self._step = shared.shards, NVLINK if links.bridged else BUS
        # Every rank's part is as large as the first's when it travels, so that some of what is gathered may be padding.
        self.block, self.root = shards * each * part.block_held(shards), shards * each * part.root_held(shards)
        reduced = REDUCED if shared.data > 1 else each
        self.reduced_block, self.reduced_root = reduced * self.block // each, reduced * self.root // each
        self.summed_block = self.reduced_block // shards if shared.replicate > 1 else 0
        """Of this rank's rows, while copies add up."""
        self.next = self.block if shards > 1 else 0
        """The block after the one in use: on its way."""
        self._block_in, self._root_in = self._gather(self._rows, self.block), self._gather(self._rows, self.root)
        self._block_out, self._root_out = self._sum(self.reduced_block), self._sum(self.reduced_root)

    # Groups of ranks

    def _group(self, size: int, stride: int) -> Group:
        """Ranks that are `stride` apart."""
        return Group(size, max(1, min(size, self._shared.here // stride)))

    @cached_property
    def _tensor(self) -> Group:
        return self._group(self._shared.tensor, 1)

    @cached_property
    def _rows(self) -> Group:
        return self._group(self._shared.shards, self._shared.tensor)

    @cached_property
    def _copies(self) -> Group:
        return self._group(self._shared.replicate, self._shared.tensor * self._shared.shards)

    # Seconds of one collective, as NCCL has them: rings; all-reduces by trees where those are shorter

    def _rate(self, group: Group) -> float:
        """All ranks of a node use its network at once, each for its own group: a group has the share of its members."""
        near, far = self._links.near, group.near * self._links.far
        return near if group.size == group.near else min(near, far)

    def _gather(self, group: Group, size: float) -> float:
        """An all-gather to, or a reduce-scatter from, so many bytes."""
        if group.size == 1:
            return 0.0
        nodes = -(-group.size // group.near)
        steps = (group.size - nodes) * self._step + (nodes - 1) * NETWORK
        return ONCE + steps + (group.size - 1) / group.size * size / self._rate(group)

    def _reduce(self, group: Group, size: float) -> float:
        """An all-reduce of so many bytes."""
        if group.size == 1:
            return 0.0
        nodes = -(-group.size // group.near)
        tree = ONCE + 2 * ((group.near - 1) * self._step + log2(nodes) * NETWORK) + 2 * size / self._rate(group)
        return min(2 * self._gather(group, size), tree)

    def _sum(self, size: float) -> float:
        """Gradients of so many bytes: each rank gets the sum of its rows, over all copies."""
        return self._gather(self._rows, size) + self._reduce(self._copies, size / self._shared.shards)

    # Of passes

    def joined(self, tokens: float, *, backward: bool, again: bool = False) -> float:
        """Seconds of tensor parallelism's sums in a pass over so many tokens; compute waits for each. `again`: the blocks' forwards run twice."""
        if self._shared.tensor == 1:
            return 0.0
        once = self._reduce(self._tensor, self._each * self._shape.hidden * tokens)
        return self._shape.layers * (JOINED * (1 + again) + JOINED_BACK * backward) * once

    def forward(self, passes: int, compute: float) -> Talk:
        """Of so many passes without a backward, each `compute` seconds in its blocks: what is in no block is gathered for the first, and stays for the others."""
        if not passes:
            return Talk(0.0, 0.0)
        blocks, each = self._shape.layers, self._block_in
        late = each + (blocks - 1) * max(0.0, each - compute / blocks)
        return Talk(passes * blocks * each + self._root_in, passes * late + self._root_in)

    def update(self, forward: float, backward: float) -> Talk:
        """Of a forward and a backward with so many seconds of compute in their blocks: blocks are gathered for both, and their gradients summed behind the next block's backward."""
        blocks, into, out = self._shape.layers, self._block_in, self._block_out
        late = into + (blocks - 1) * max(0.0, into - forward / blocks)
        late += (blocks - 1) * max(0.0, into + out - backward / blocks) + out  # the first of them comes behind the head's backward
        ends = self._root_in + self._root_out
        return Talk(blocks * (2 * into + out) + ends, late + ends)

    # Of generation

    @cached_property
    def _cut(self) -> tuple[int, int]:
        """Parameters of which no rank has all, of a block and of what is in none: what each has whole is generated with as it is."""
        shape, ranks = self._shape, self._shared.tensor
        if self._shared.shards > 1:
            return shape.block, shape.root_held()
        # What is here of a block is what is whole and one part of what is cut.
        return (shape.block - self._part.block) * ranks // (ranks - 1) if ranks > 1 else 0, 0

    def kept(self, way: Gathering | None) -> int:
        """Bytes that a rank has beside its own part while it generates: all; or three blocks, and one part of one (cluster/by_layer.py)."""
        block, root = self._cut
        if way == "layers":
            return self._each * (root + 3 * block + block // self._shared.held)
        return self._each * (self._shape.parameters if root else self._shape.layers * block)

    def generate(self, way: Gathering | None, passes: float, compute: float, rates: Rates) -> Talk:
        """Of a phase of so many passes and seconds. What is whole for the phase comes tensor by tensor before the first, and is copied once more."""
        shape, (block, root) = self._shape, self._cut
        if way == "layers":
            once = shape.layers * self._gather(self._group(self._shared.held, 1), self._each * block)
            before = self._whole(self._each * root, 2 if shape.tied else 3, rates)
            return Talk(before + passes * once, before + once / shape.layers + max(0.0, passes * once - compute))
        before = self._whole(self.kept(way), shape.tensors, rates)
        return Talk(before, before)

    def _whole(self, size: int, tensors: int, rates: Rates) -> float:
        """Seconds for so many bytes in so many tensors, one after the other: of the link, or of the host that hands them to it."""
        if not size:
            return 0.0
        mean, shared = size / tensors, self._shared
        sent = self._gather(self._rows, mean / shared.tensor) + self._gather(self._tensor, mean) + 2 * mean / rates.copy
        return tensors * max(sent, (GATHER_OPS + GATHER_OPS_RANK * shared.shards) / rates.host_op)
