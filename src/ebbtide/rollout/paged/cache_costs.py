"""How much memory the paged engine needs: the KV cache per token, the states of sequences, and the workspace of a pass.
This is pure Python without torch: the planner uses it before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ebbtide.config.rollout import RolloutConfig
from ebbtide.memory.plan import HoldingName, HoldingSpec
from ebbtide.model.attention_sizes import MOST_SPLITS
from ebbtide.model.quantized_sizes import sampling_scratch
from ebbtide.model.shape import Shape
from ebbtide.model.traced_shape import TracedShape
from ebbtide.system.units import ceil_div

FEWER = "lower `rollout.max_num_seqs`"
KV_CACHE = HoldingSpec("kv_cache", frozenset({"generate"}), advice={"generate": FEWER, "evaluate": FEWER})
"""The KV cache: between generations there is one where unfinished completions keep theirs."""
SEQUENCE_STATES = HoldingSpec("sequence_states", frozenset({"generate"}), advice=KV_CACHE.advice)
"""The states that layers such as Mamba pass from token to token, a slot for each sequence. They are there with the KV
cache, and kept as it is."""

FREE_MEMORY_FRACTION = 0.95  # the part of the memory free at the start of generation that cache and workspace may fill
STATES_MEMORY_FRACTION = 0.5  # the part of that free memory that states may take; the KV cache gets the rest
FEWEST_STATES = 2  # a prompt and its sample
BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # tokens of a block
PREFILL_CHUNK_TOKENS = {"cpu": 2048, "cuda": 16384}  # tokens that are prefilled in one pass, at most
FEWEST_PREFILLED = 1024  # and at least, however little memory there is
PREFILL_MEMORY_FRACTION = 1 / 16  # the part of free memory that a prefill may take where the KV cache could fill it
MOST_STEPS = 64  # in which a plan follows sequences until they end
LOGIT_ROWS_AT_ONCE = 512  # rows of logits that are in memory at once after a prefill
SORTED_ROWS_AT_ONCE = 64  # rows of logits that are sorted at once for top-k and top-p
# The batch sizes that CUDA graphs are captured for; larger ones go in steps of 128.
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


@dataclass(frozen=True)
class CacheSize:
    """How much a KV cache holds."""

    blocks: int
    states: int | None = None
    """The sequences whose states it holds; None for a model whose layers have none."""

    def fits(self, other: CacheSize) -> bool:
        """Tells whether what this holds fits into another one."""
        return self.blocks <= other.blocks and (self.states or 0) <= (other.states or 0)


def graph_batch_size(rows: int) -> int:
    """Returns the batch size of the CUDA graph that decodes `rows` samples."""
    return next((size for size in GRAPH_BATCH_SIZES if size >= rows), ceil_div(rows, 128) * 128)


def blocks_for(tokens: int, block: int) -> int:
    """Returns the blocks of `block` tokens that `tokens` tokens need."""
    return ceil_div(tokens, block)


def kept_blocks(rollout: RolloutConfig, block: int) -> int:
    """Returns the most blocks of `block` tokens of a KV cache that is kept between steps: that of unfinished groups, at
    most `rollout.partial.extra_prompts` of them, each a prompt and its samples."""
    samples = rollout.group_size * blocks_for(rollout.max_new_tokens, block)
    return rollout.partial.extra_prompts * (blocks_for(rollout.max_prompt_tokens, block) + samples)


def useful_blocks(prompts: list[tuple[int, int]], new: int, batch: int, block: int, *, shared: bool = True) -> int:
    """Returns the most blocks that a generation can fill: `prompts` are pairs of a prompt's length and its number of
    samples, of which `batch` decode at once, with at most `new` tokens each."""
    running = min(batch, sum(samples for _, samples in prompts))
    read = sum(blocks_for(length, block) * (1 if shared else samples) for length, samples in prompts)
    return read + running * (blocks_for(new, block) + 1)


@cache
def decode_passes(blocks: int, sequences: int, new: int, block: int) -> tuple[int, int]:
    """Returns about how many passes it takes to decode so many sequences of `new` tokens each that begin together, with
    so many blocks for their tokens, and how many tokens are prefilled again. As in the scheduler, those that were
    admitted last give up their blocks where there are none left, and go on with the tokens they have once others have
    ended."""
    length = max(1, blocks_for(new, block))
    coarser = ceil_div(length, MOST_STEPS)
    length, blocks = ceil_div(length, coarser), blocks // coarser
    waiting, running = (
        [(sequences, 0)] if sequences else [],
        list[tuple[int, int]](),
    )  # (how many, blocks of each), the next ones last
    free, steps, given_up = blocks, 0, 0
    while waiting or running:
        busy = sum(count for count, _ in running)
        while waiting:
            count, own = waiting[-1]
            admitted = min(count, max((free - busy + 1) // (max(1, own) + 1), 0 if running else 1))
            if not admitted:
                break
            waiting[-1:] = [(count - admitted, own)] if admitted < count else []
            running.append((admitted, own))
            free, busy = free - admitted * own, busy + admitted
        while busy > max(free, 1):
            count, own = running.pop()
            left = min(count, ceil_div(busy - free, own + 1), busy - 1)
            waiting.append((left, own))
            running += [(count - left, own)] if left < count else []
            free, busy, given_up = free + left * own, busy - left, given_up + left * own
        free, steps = free - busy, steps + 1
        running = [(count, own + 1) for count, own in running]
        free += sum(count * own for count, own in running if own == length)
        running = [(count, own) for count, own in running if own < length]
    return ceil_div(steps * new, length), ceil_div(given_up * new, length)


def kept_sequences(rollout: RolloutConfig) -> int:
    """Returns the most prompts and samples whose states are kept between steps."""
    return rollout.partial.extra_prompts * (1 + rollout.group_size)


def useful_states(prompts: int, samples: int, batch: int) -> int:
    """Returns the most sequences that have states at once, of so many prompts with `samples` samples each, of which
    `batch` decode at once: each that decodes, and the prompts that samples begin from."""
    running = min(batch, prompts * samples)
    return running + min(running, prompts)


def fitting_states(each: int, useful: int, free: int) -> int:
    """Returns how many sequences have states of `each` bytes at once: `useful` ones, or as many as fit into a part of
    the `free` bytes. There is one slot more, which padding rows use."""
    return min(useful, int(STATES_MEMORY_FRACTION * free) // each - 1)


@dataclass(frozen=True)
class LayerCache:
    """The sizes of one layer's keys and values in the KV cache."""

    kv_heads: int
    """The key-value heads."""
    key_channels: int
    value_channels: int

    @property
    def numbers(self) -> int:
        """The numbers of one token."""
        return self.kv_heads * (self.key_channels + self.value_channels)


@dataclass(frozen=True)
class CacheCosts:
    """The sizes of a model that decide what its KV cache and a pass need, and the bytes that follow from them."""

    layers: tuple[LayerCache, ...]
    """The layers that have keys and values of their own: not those that share another's, or have a state instead."""
    hidden: int
    queries: int
    """The numbers of one token's queries, in the layer that has most."""
    mlp: int
    vocabulary: int
    scratch: int = 0
    """The numbers that are made of a quantized base's codes at once."""
    state_bytes: int = 0
    """The bytes of the states of one sequence, of all layers."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of the KV cache per token, with elements of `itemsize` bytes."""
        return sum(layer.numbers for layer in self.layers) * itemsize

    def kept_bytes(self, rollout: RolloutConfig, itemsize: int, block: int) -> dict[HoldingName, int]:
        """Returns the bytes of the KV cache that is kept between steps, if there is one, and of the states beside
        it."""
        if rollout.partial.kv_cache != "keep":
            return {}
        kept = {KV_CACHE.name: kept_blocks(rollout, block) * block * self.bytes_per_token(itemsize)}
        states = {SEQUENCE_STATES.name: (kept_sequences(rollout) + 1) * self.state_bytes}
        return kept | states if self.state_bytes else kept

    def workspace_bytes(self, itemsize: int, chunk: int, batch: int) -> int:
        """Returns the bytes that passes need in addition to the cache: to prefill `chunk` tokens at once, and to decode
        and sample for `batch` samples. Elements have `itemsize` bytes."""
        sampling = (
            2 * min(batch, LOGIT_ROWS_AT_ONCE) * self.vocabulary * itemsize + SORTED_ROWS_AT_ONCE * self.vocabulary * 40
        )
        splits = MOST_SPLITS * batch * self.queries * 4  # the partial results of split-KV attention, in fp32
        return (chunk * self._token + self.scratch) * itemsize + sampling + splits

    @property
    def _token(self) -> int:
        """The elements in memory at once for each token of a prefill, at most."""
        return 8 * self.hidden + 4 * self.queries + 4 * self.mlp

    def fit(
        self, itemsize: int, block: int, most: int, batch: int, free: int, *, useful: int, least: int
    ) -> tuple[int, int]:
        """Returns how many blocks of a KV cache, of at most `useful` ones, fit into `free` bytes, and how many tokens
        are prefilled in one pass beside it. These are `most`, or as many as there is room for beside all useful blocks;
        if there is none, a small part of the memory is theirs, where that leaves the `least` blocks."""
        room = int(FREE_MEMORY_FRACTION * free) - self.workspace_bytes(itemsize, 0, batch)
        each, token = block * self.bytes_per_token(itemsize), self._token * itemsize

        def beside(chunk: int) -> int:
            return max(0, room - chunk * token) // each

        fewest = min(most, FEWEST_PREFILLED)
        chunk = max(fewest, min(most, (room - useful * each) // token))
        if beside(chunk) < useful:
            chunk = max(fewest, min(most, int(PREFILL_MEMORY_FRACTION * free) // token))
            chunk = chunk if beside(chunk) >= least else fewest
        return min(beside(chunk), useful), chunk


def cache_costs_of(shape: Shape) -> CacheCosts:
    """The paged engine's memory costs for a model of this shape."""
    if isinstance(shape, TracedShape):
        layers = tuple(LayerCache(*sizes) for sizes in shape.kv_layers)
        return CacheCosts(
            layers, shape.hidden, shape.queries, shape.mlp, shape.vocabulary, state_bytes=shape.state_bytes
        )
    return CacheCosts(
        (LayerCache(shape.kv_heads, shape.head_dim, shape.head_dim),) * shape.layers,
        shape.hidden,
        shape.queries,
        shape.widest_layer,
        shape.vocabulary,
        sampling_scratch(shape),
    )
