"""What one rank has of a model, and the machine that it computes on: what the costs of all parts depend on. With
several ranks it is rank 0, which has the largest shards. Imports no torch."""

from __future__ import annotations

from ebbtide.model.shape import Shape
from ebbtide.parallel.costs import GatherCosts, MeshShape
from ebbtide.system.machine import Machine


class RankModel:
    """One rank's share of a model of this shape."""

    def __init__(
        self, shape: Shape, machine: Machine, *, itemsize: int = 2, on_cpu: bool = False, mesh: MeshShape | None = None
    ) -> None:
        """`itemsize`: bytes of a number."""
        self.shape, self.machine, self.itemsize, self.mesh = shape, machine, itemsize, mesh or MeshShape()
        self.device_type = "cpu" if on_cpu else "cuda"
        self.tp_shape = shape.tensor_parallel_shape(self.mesh.tensor)
        """The shape that this rank computes with in training (tensor parallelism). Generation has the whole model."""
        self.parameters = self.tp_shape.model_shard(self.mesh.fsdp_size)
        """Parameters of this rank's shard, without adapters."""
        adapters = self.tp_shape.adapters_shard(self.mesh.fsdp_size)
        self.trained = self.parameters if shape.lora is None else adapters
        """Those that are trained: all, or the adapters'."""
        self.gathers = (
            GatherCosts(shape, self.tp_shape, self.mesh, machine.links, itemsize) if self.mesh.size > 1 else None
        )
