"""Predicts the memory and the seconds of a phase that generates, on a training rank or on a rollout worker, and the
weight sync before it."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.config.root import Config
from ebbtide.model.shape import Shape
from ebbtide.parallel.costs import WEIGHT_SYNC_BUCKET, CommTime, GatherCosts, MeshShape
from ebbtide.planner.prediction import Generation, PhaseCost, Seconds
from ebbtide.planner.speed import Speed
from ebbtide.planner.train_memory import widest_layer
from ebbtide.planner.workload import Workload
from ebbtide.rollout.paged.cache_costs import (
    BLOCK_SIZES,
    FREE_MEMORY_FRACTION,
    PREFILL_CHUNK_TOKENS,
    CacheCosts,
    blocks_for,
    graph_batch_size,
    useful_blocks,
)
from ebbtide.system.machine import Machine


def cache_costs_of(shape: Shape) -> CacheCosts:
    """The paged engine's memory costs for a model of this shape."""
    return CacheCosts(
        shape.layers, shape.kv_heads, shape.head_dim, shape.hidden, shape.heads, widest_layer(shape), shape.vocabulary
    )


class GenerationCosts:
    """Predicts generation with the whole model. `gathers`: None on a single rank; `kind`: "cuda" or "cpu"."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        sharing: MeshShape,
        gathers: GatherCosts | None,
        speed: Speed,
        itemsize: int,
        kind: str,
    ) -> None:
        self._shape, self._machine, self._sharing, self._gathers = shape, machine, sharing, gathers
        self._speed, self._itemsize = speed, itemsize
        self._block, self._prefill_chunk = BLOCK_SIZES[kind], PREFILL_CHUNK_TOKENS[kind]

    def set_costs(self, config: Config, work: Workload, phase: PhaseCost, budget: int) -> Generation:
        """Sets the memory and the seconds of a phase that generates, on the training ranks or on rollout workers."""
        workers = config.parallel.rollout_gpus if config.parallel is not None else 0
        if workers:
            worker = PhaseCost({"weights": self._itemsize * self._shape.parameters})
            generation = self._sample_on_rank(config, work.largest_share(workers), worker, budget)
            # Weights are gathered and concatenated into a buffer; a tensor larger than it is sent alone.
            phase.device["gathered"] = max(
                2 * min(WEIGHT_SYNC_BUCKET, self._itemsize * self._shape.parameters),
                self._itemsize * self._shape.largest_tensor,
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
        gather_seconds = (
            self._gathers.generate_time("gathered", 0, 0.0, self._machine.rates).seconds
            if self._gathers is not None
            else 0.0
        )
        return gather_seconds + self._itemsize * self._shape.parameters / link

    def _sample_on_rank(self, config: Config, work: Workload, phase: PhaseCost, budget: int) -> Generation:
        """Sets the memory and the seconds of one rank that generates; `work` is that rank's share."""
        shape, itemsize, block = self._shape, self._itemsize, self._block
        costs, batch = cache_costs_of(shape), config.rollout.max_num_seqs
        if config.rollout.engine == "paged":
            phase.device.pop("kv_cache", None)  # A KV cache that was kept becomes part of the new one.
        prompt, max_concurrent = round(work.prompt_tokens), min(batch, work.sequences)
        concurrent = max_concurrent
        min_blocks = blocks_for(prompt, block) + blocks_for(work.max_new_tokens, block)
        block_bytes = block * costs.bytes_per_token(itemsize)
        blocks: int | None = None
        is_full_size, min_peak = True, 0.0
        # Sequences that decode at a time on average: few have their full length at the same time.
        mean = float(concurrent)
        if config.rollout.engine == "paged":
            begun = work.prompts + config.rollout.partial.extra_prompts
            useful = useful_blocks([(prompt, work.samples)] * begun, work.max_new_tokens, batch, block)
            blocks = min(
                useful,
                costs.blocks_that_fit(itemsize, block, self._prefill_chunk, batch, max(0, budget - phase.peak)),
            )
            is_full_size = blocks == useful
            workspace = costs.workspace_bytes(itemsize, self._prefill_chunk, batch)
            min_peak = phase.peak + ((min_blocks + 1) * block_bytes + workspace) / FREE_MEMORY_FRACTION
            if not is_full_size:
                blocks_own = blocks_for(work.max_new_tokens, block)
                blocks_shared = blocks_for(prompt, block) / work.samples
                concurrent = min(concurrent, int(blocks // (blocks_own + 1 + blocks_shared)))
                mean = max(1.0, min(mean, blocks / ((blocks_own + 1) / 2 + blocks_shared)))
            phase.device["kv_cache"] = blocks * block_bytes
        elif config.rollout.engine == "huggingface":
            phase.device["kv_cache"] = concurrent * (prompt + work.max_new_tokens) * costs.bytes_per_token(itemsize)
        if config.rollout.engine != "vllm":  # vLLM's share of memory includes its workspace.
            wide = widest_layer(shape)
            prefill = itemsize * min(self._prefill_chunk, work.prompts * prompt) * (3 * shape.hidden + 3 * wide)
            size = graph_batch_size(max(1, concurrent))
            splits = blocks_for(work.max_new_tokens, 256) + blocks_for(prompt, 256)
            numbers = 2 * shape.vocabulary + 4 * shape.hidden + 3 * wide
            decode = itemsize * size * numbers + 4 * splits * size * shape.queries
            phase.device |= {"activations": max(prefill, decode), "workspace": decode}
        mode, communication = config.rollout_weights(self._sharing.shards), CommTime(0.0, 0.0)
        seconds = self._speed.generate(work, mean, captured=mode != "layerwise")
        if self._gathers is not None and mode is not None:
            communication = self._gathers.generate_time(
                mode, work.decode_passes(mean) + 1, seconds, self._machine.rates
            )
        phase.add_seconds(
            1, Seconds(seconds + communication.exposed, 0.0, communication.seconds, communication.exposed)
        )
        return Generation(blocks, block, min_blocks, is_full_size, concurrent, min_peak, max_concurrent)
