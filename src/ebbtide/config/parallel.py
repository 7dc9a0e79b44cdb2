"""The section `parallel`: several ranks that train one policy together."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ebbtide.config.base import Count, Natural, Section

RolloutWeightsMode = Literal["gathered", "layerwise"]


class ParallelConfig(Section):
    """Several processes (ranks), one per GPU, that train one policy. On a CPU a rank is a process as well."""

    gpus: Count | None = None
    """Number of ranks that train. They are started on this machine, or over several nodes with `parallel.ray`. `null`
    is `data` x `tensor`, or, under `torchrun`, its number of processes less `rollout_gpus`."""

    data: Count | None = None
    """Data-parallel ranks: samples, weights, gradients and optimizer state are sharded over them (FSDP2). `null` is
    `gpus / tensor`."""

    tensor: Count = 1
    """Tensor-parallel ranks: each matrix is sharded over them and they work on the same samples, by the plan that the
    model's own config declares. Keep them within one node."""

    replicate: Count = 1
    """Copies of the weights (hybrid sharding): each is sharded over `data / replicate` ranks. More than 1 saves
    traffic between nodes and costs memory."""

    rollout_weights: RolloutWeightsMode | None = None
    """How each rank all-gathers the weights to generate and to evaluate: `gathered`, all of them once per phase, which
    needs memory for the whole model; or `layerwise`, each layer in every forward pass just before it computes, which
    needs memory for three layers, has no CUDA graphs, and depends on the speed of the link between ranks. `null` is
    `gathered`, unless a plan finds that it does not fit (`memory.plan`)."""

    rollout_gpus: Natural = 0
    """Rollout workers: ranks in addition to those of `gpus`, `data` and `tensor` that only generate, each with the
    whole model. They are sent the weights after every change; the training ranks then need neither gathered weights
    nor a KV cache. 0 is none: the training ranks generate. `torchrun` starts all of them."""

    ray: str | None = None
    """If set, Ray (package `ray`) places the ranks on the nodes of its cluster: `auto` is the cluster that runs on
    this machine, or one started for the run; otherwise the address of a cluster. All nodes need the run folder at the
    same path."""

    max_restarts: Natural = 3
    """With `ray`: how often the ranks are restarted after one of them, or its node, is lost. They resume from the last
    checkpoint, or start over if there is none."""

    @model_validator(mode="after")
    def _rank_counts_agree(self) -> ParallelConfig:
        if self.gpus is not None and self.data is not None and self.gpus != self.data * self.tensor:
            raise ValueError(
                f"`parallel.gpus: {self.gpus}` is not `parallel.data: {self.data}` x `parallel.tensor: {self.tensor}`:"
                f" set it to {self.data * self.tensor}, or remove one of the three"
            )
        if self.rollout_weights is not None and self.rollout_gpus:
            raise ValueError(
                f"`parallel.rollout_weights: {self.rollout_weights}` is for ranks that both train and generate, and"
                f" with `parallel.rollout_gpus: {self.rollout_gpus}` none does: remove one of the two"
            )
        if self.ray is not None and self.ranks is None:
            raise ValueError(f"`parallel.ray: {self.ray}` needs the number of ranks to place: set `parallel.gpus`")
        if self.ranks is not None and self.ranks % self.tensor:
            raise ValueError(
                f"`parallel.gpus: {self.gpus}` is not a multiple of `parallel.tensor: {self.tensor}`: change one of"
                " the two"
            )
        if self.ranks is not None and (self.ranks // self.tensor) % self.replicate:
            raise ValueError(
                f"`parallel.replicate: {self.replicate}` does not divide the {self.ranks // self.tensor} data-parallel"
                " ranks: set a divisor of that number"
            )
        return self

    @property
    def ranks(self) -> int | None:
        """The number of ranks that train; None if the launcher (`torchrun`) decides it."""
        if self.gpus is not None or self.data is None:
            return self.gpus
        return self.data * self.tensor
