"""What generation costs, on a training rank or on a rollout worker, with the weight sync before it. Imports no torch.

The constants are fitted to what benchmarks/rollout.py took on an H200, within 11%. Machines differ by their rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ebbtide.config.rollout import VllmConfig
from ebbtide.config.root import Config
from ebbtide.memory.costs import HoldingBytes, PhaseCost, PhaseCosts, PlannedRun, Seconds
from ebbtide.memory.plan import HoldingSpec
from ebbtide.model.attention_sizes import MOST_SPLITS, SPLIT
from ebbtide.model.quantized_sizes import (
    MOST_ROWS,
    block_numbers,
    dequantized_traffic,
    sampling_scratch,
)
from ebbtide.model.workload import Workload
from ebbtide.parallel.costs import GATHERED, WEIGHT_SYNC_BUCKET, CommTime
from ebbtide.parallel.rank_model import RankModel
from ebbtide.policy.compute_costs import FusedSpeed, Speed, overlap
from ebbtide.policy.fused_costs import can_fuse
from ebbtide.policy.model_costs import SAMPLING_PHASES
from ebbtide.policy.traced_costs import TracedSpeed
from ebbtide.rollout.paged.cache_costs import (
    BLOCK_SIZES,
    FEWEST_PREFILLED,
    FEWEST_STATES,
    FREE_MEMORY_FRACTION,
    KV_CACHE,
    PREFILL_CHUNK_TOKENS,
    SEQUENCE_STATES,
    blocks_for,
    cache_costs_of,
    decode_passes,
    fitting_states,
    graph_batch_size,
    useful_blocks,
    useful_states,
)
from ebbtide.system.units import GIB, ceil_div

# Seconds per layer of a decode step, and multiples of what the rates alone would give for weights, KV cache and
# matmuls.
DECODE_LAYER, DECODE_WEIGHTS, DECODE_CACHE, DECODE_MATMULS = 30e-6, 0.75, 1.12, 1.1
DECODE_EXPERTS = 37e-6  # Additional seconds per block of a decode step with experts, for routing and grouping tokens.
# The same per linear layer with an adapter, which its matmul adds; or kernels of its own, beside a quantized base.
DECODE_ADAPTER, DECODE_ADAPTER_APART = 0.8e-6, 5.6e-6
DECODE_QUANTIZED = {"float8": 1.1, "int4": 1.45}  # What products of few rows take of those in bfloat16, on an H200.


@dataclass(frozen=True)
class Generation:
    """The KV cache of a phase that generates, and how many sequences it serves."""

    blocks: int | None
    """Blocks of the paged KV cache; None for other engines."""
    block_tokens: int
    """Tokens per block."""
    min_blocks: int
    """Blocks that the longest sample needs; with fewer, nothing can be generated."""
    cache_is_full_size: bool
    """Whether the KV cache has as many blocks as the sequences can use."""
    concurrent: int
    """Sequences of the maximum length that the KV cache has room for at a time."""
    min_peak: float
    """Bytes on the device with a KV cache for one sample only."""
    max_concurrent: int = 0
    """Sequences that would decode at a time with a KV cache of full size."""
    rollout_worker_bytes: int = 0
    """Bytes on the device of a rollout worker (a rank that only generates), if there are any."""


class GenerationCosts:
    """Generation with the whole model, in the phases that sample."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank
        self._shape, self._machine, self._sharing, self._gathers = rank.shape, rank.machine, rank.mesh, rank.gathers
        self._itemsize = rank.itemsize
        self._is_fused = can_fuse(rank.shape, rank.itemsize, rank.device_type, tensor_parallel=1)
        speed: type[Speed] = FusedSpeed if self._is_fused else Speed
        speed = TracedSpeed if rank.shape.is_traced else speed
        self._speed = speed(rank.shape, rank.machine.rates, rank.itemsize)
        self._block, self._prefill_chunk = BLOCK_SIZES[rank.device_type], PREFILL_CHUNK_TOKENS[rank.device_type]

    @staticmethod
    def holdings(config: Config, shards: int) -> Sequence[HoldingSpec]:
        return [*([GATHERED] if shards > 1 else []), *([KV_CACHE, SEQUENCE_STATES] if config.generates else [])]

    def sizes(self, config: Config) -> HoldingBytes:
        """The KV cache that is kept between steps."""
        if not config.generates:
            return HoldingBytes({})
        return HoldingBytes(cache_costs_of(self._shape).kept_bytes(config.rollout, self._itemsize, self._block))

    def generation(self, run: PlannedRun, phases: PhaseCosts) -> Generation:
        """Adds the costs of the phases that sample. Returns what the last of them, training before evaluation, has of a
        KV cache."""
        config = run.config
        found = Generation(None, self._block, 0, cache_is_full_size=True, concurrent=0, min_peak=0.0)
        if config.generates and config.rollout.engine == "vllm":
            vllm = config.rollout.vllm or VllmConfig()
            for at, phase in phases.items():
                if at in SAMPLING_PHASES or vllm.sleep_level == 0:
                    # vLLM's share includes its copy of the weights.
                    phase.device[KV_CACHE.name] = int(vllm.memory_share * self._machine.device_gib * GIB)
        if config.evaluate is not None and config.generates and "evaluate" in phases:
            found = self.set_costs(config, run.evaluated, phases["evaluate"], run.budget)
        if config.rollout.replay is None and "generate" in phases:  # A replay generates nothing.
            found = self.set_costs(config, run.work, phases["generate"], run.budget)
        return found

    def set_costs(self, config: Config, work: Workload, phase: PhaseCost, budget: int) -> Generation:
        """Sets the memory and the seconds of a phase that generates, on the training ranks or on rollout workers."""
        workers = config.parallel.rollout_gpus if config.parallel is not None else 0
        if workers:
            shape, sent = self._shape, self._sent_bytes
            worker = PhaseCost({"weights": self._itemsize * (shape.parameters + shape.adapter_parameters)})
            generation = self._sample_on_rank(config, work.largest_share(workers), worker, budget)
            # Weights are gathered and concatenated into a buffer; a tensor larger than it is sent alone.
            phase.device["gathered"] = max(
                2 * min(WEIGHT_SYNC_BUCKET, sent), self._itemsize * shape.largest_trained_tensor
            )
            sync_seconds = self._weight_sync_seconds(workers)
            phase.add_seconds(1, Seconds(worker.seconds + sync_seconds, 0.0, sync_seconds, sync_seconds))
            return replace(generation, rollout_worker_bytes=worker.peak)
        if self._gathers is not None:
            phase.device["gathered"] = self._gathers.gathered_bytes(config.rollout_weights(self._sharing.shards))
        return self._sample_on_rank(config, work.largest_share(self._sharing.size), phase, budget)

    def _weight_sync_seconds(self, workers: int) -> float:
        """Seconds of a weight sync: gathering the weights and sending them to so many rollout workers."""
        links = self._machine.links
        link = links.near if self._sharing.size + workers <= self._sharing.node else links.far
        gather = self._gathers.weight_sync_seconds(self._machine.rates) if self._gathers is not None else 0.0
        return gather + self._sent_bytes / link

    @property
    def _sent_bytes(self) -> int:
        """The bytes that rollout workers are sent after an update."""
        return self._itemsize * (self._shape.parameters if self._shape.lora is None else self._shape.adapter_parameters)

    def _sample_on_rank(self, config: Config, work: Workload, phase: PhaseCost, budget: int) -> Generation:
        """Sets the memory and the seconds of one rank that generates; `work` is that rank's share."""
        shape, itemsize, block = self._shape, self._itemsize, self._block
        costs, batch = cache_costs_of(shape), config.rollout.max_num_seqs
        if config.rollout.engine == "paged":
            for spec in (KV_CACHE, SEQUENCE_STATES):  # A KV cache that was kept becomes part of the new one.
                phase.device.pop(spec.name, None)
        prompt, max_concurrent = round(work.prompt_tokens), min(batch, work.sequences)
        concurrent, chunk = max_concurrent, self._prefill_chunk
        min_blocks = blocks_for(prompt, block) + blocks_for(work.max_new_tokens, block)
        block_bytes = block * costs.bytes_per_token(itemsize)
        blocks: int | None = None
        is_full_size, min_peak, recomputed = True, 0.0, 0
        # Sequences that decode at a time on average: few have their full length at the same time.
        mean = float(concurrent)
        if config.rollout.engine == "paged":
            begun = work.prompts + config.rollout.partial.extra_prompts
            useful = useful_blocks([(prompt, work.samples)] * begun, work.max_new_tokens, batch, block)
            free = max(0, budget - phase.peak)
            if costs.state_bytes:
                wanted = useful_states(begun, work.samples, batch)
                states = max(FEWEST_STATES, fitting_states(costs.state_bytes, wanted, free))
                phase.device[SEQUENCE_STATES.name] = (states + 1) * costs.state_bytes
                concurrent, mean = min(concurrent, states), min(mean, float(states))
                free = max(0, free - phase.device[SEQUENCE_STATES.name])
            blocks, chunk = costs.fit(itemsize, block, chunk, batch, free, useful=useful, least=min_blocks)
            is_full_size = blocks == useful
            workspace = costs.workspace_bytes(itemsize, min(chunk, FEWEST_PREFILLED), batch)
            min_peak = phase.peak + ((min_blocks + 1) * block_bytes + workspace) / FREE_MEMORY_FRACTION
            if not is_full_size:
                blocks_own = blocks_for(work.max_new_tokens, block)
                blocks_shared = blocks_for(prompt, block) / work.samples
                concurrent = min(concurrent, int(blocks // (blocks_own + 1 + blocks_shared)))
                mean = max(1.0, min(mean, blocks / ((blocks_own + 1) / 2 + blocks_shared)))
                if work.longest == work.new_tokens:  # Then all need the most at the same time.
                    own = max(blocks_own + 1, blocks - round(mean * blocks_shared))
                    passes, again = decode_passes(own, max_concurrent, round(work.new_tokens), block)
                    mean = min(mean, max_concurrent * work.new_tokens / passes)
                    recomputed = ceil_div(again * work.sequences, max_concurrent)
            phase.device["kv_cache"] = blocks * block_bytes
        elif config.rollout.engine == "huggingface":
            phase.device["kv_cache"] = concurrent * (prompt + work.max_new_tokens) * costs.bytes_per_token(itemsize)
            if costs.state_bytes:
                phase.device[SEQUENCE_STATES.name] = concurrent * costs.state_bytes
        if config.rollout.engine != "vllm":  # vLLM's share of memory includes its workspace.
            wide = shape.widest_layer
            prefill = itemsize * min(chunk, work.prompts * prompt) * (3 * shape.hidden + 3 * wide)
            on_transformers = config.rollout.engine == "huggingface"
            scratch = itemsize * sampling_scratch(shape, whole_head=on_transformers)
            prefill += scratch
            size = graph_batch_size(max(1, concurrent))
            splits = min(MOST_SPLITS, blocks_for(prompt + work.max_new_tokens, SPLIT))
            numbers = 2 * shape.vocabulary + 4 * shape.hidden + 3 * wide
            decode = itemsize * size * numbers + 4 * splits * size * shape.queries
            if on_transformers or size > MOST_ROWS or itemsize > 2:  # Else codes become numbers inside the matmul.
                decode += scratch
            phase.device |= {"activations": max(prefill, decode), "workspace": decode}
        mode, communication = config.rollout_weights(self._sharing.shards), CommTime(0.0, 0.0)
        seconds = self.seconds(work, mean, captured=mode != "layerwise")
        seconds += self._recompute_seconds(work, recomputed, chunk)
        if self._gathers is not None and mode is not None:
            communication = self._gathers.generate_time(
                mode, work.decode_passes(mean) + 1, seconds, self._machine.rates
            )
        phase.add_seconds(
            1, Seconds(seconds + communication.exposed, 0.0, communication.seconds, communication.exposed)
        )
        return Generation(blocks, block, min_blocks, is_full_size, concurrent, min_peak, max_concurrent)

    def _recompute_seconds(self, work: Workload, tokens: int, chunk: int) -> float:
        """Seconds of prefilling tokens again whose keys and values were given up for others."""
        passes = ceil_div(tokens, chunk)
        return passes * self._speed.forward(tokens / max(1, passes), work.prompt_tokens + work.new_tokens / 2)

    def seconds(self, work: Workload, rows: float, *, captured: bool = True) -> float:
        """Seconds of generating all samples of a step, with `rows` of them in the batch while there are enough. Each
        prompt is prefilled once per group. `captured`: whether CUDA graphs may be used for decoding."""
        shape, rates = self._shape, self._machine.rates
        passes = work.decode_passes(rows)
        rows = work.sequences * work.new_tokens / passes
        kv_bytes = shape.kv_numbers_per_token * self._itemsize
        cache = rows * kv_bytes * (work.new_tokens / 2 + work.prompt_tokens / work.samples) / rates.copy
        # States are read and written for each token.
        cache += 2 * rows * cache_costs_of(shape).state_bytes / rates.copy
        used = shape.layers * shape.matmul_parameters_per_token + shape.embedding
        read = float(self._itemsize * (shape.parameters - (0 if shape.tied else shape.embedding)))
        if shape.base is not None:
            longer = (DECODE_QUANTIZED[shape.base] - 1) * self._itemsize * shape.layers * block_numbers(shape)
            read += longer if rows <= MOST_ROWS else dequantized_traffic(shape)
        if shape.base_embeddings:  # Numbers are written and read, or made inside the matmul.
            longer = (DECODE_QUANTIZED["float8"] - 1) * self._itemsize
            read += shape.embedding * (longer if rows <= MOST_ROWS else 3.0)
        matmuls = 2 * used * rows / rates.matmul
        starts = shape.layers * (DECODE_LAYER + (DECODE_EXPERTS if shape.experts else 0.0))
        starts += shape.layers * len(shape.adapters) * (DECODE_ADAPTER_APART if shape.base else DECODE_ADAPTER)
        decode = starts + DECODE_WEIGHTS * read / rates.copy + DECODE_CACHE * cache + DECODE_MATMULS * matmuls
        captures = not shape.experts or (self._machine.has_grouped_matmul and self._itemsize == 2)
        if not (captured and captures):  # Without CUDA graphs the host launches every kernel.
            decode = overlap(decode, self._speed.host("fused forward" if self._is_fused else "forward"))
        prefill = self._speed.forward(work.prompts * work.prompt_tokens, work.prompt_tokens)
        return passes * decode + prefill
