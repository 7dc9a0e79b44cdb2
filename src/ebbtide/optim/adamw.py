"""AdamW with fp32 masters, behind one interface wherever its state lives: on the device, streamed through it, on the CPU, or split between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.plan import Name
from ebbtide.memory.residency import Residency
from ebbtide.memory.shards import Region, local
from ebbtide.optim.layout import Segment, shared_out
from ebbtide.optim.on_cpu import OnCpu
from ebbtide.optim.on_device import OnDevice
from ebbtide.optim.part import Exact, Kind, Part, Trained, exact, moment_type
from ebbtide.optim.rule import Rule, State
from ebbtide.optim.streamed import Streamed


@dataclass(frozen=True)
class Stored:
    """A master or a moment of one parameter, in pieces."""

    kind: Kind
    region: Region
    """The part of the parameter that it belongs to."""
    dtype: torch.dtype
    pieces: Sequence[tuple[Segment, Tensor, State]]

    @torch.no_grad()
    def fill(self, out: Tensor, at: Callable[[Tensor], Tensor]) -> None:
        """Writes it into a flat tensor on the host; `at` says where a tensor's bytes are read."""
        for segment, weight, state in self.pieces:
            low = None if state.low is None else at(state.low)
            there = State(low, at(state.first), at(state.second)).part(segment.offset, segment.offset + segment.size)
            out[segment.start : segment.stop] = exact(self.kind, at(weight).to(there.second.device), there)


Norms = list[tuple[int, float]]
"""(number of a parameter, norm of its gradient or of a stretch of it)."""

Total = Callable[[Norms, Sequence[nn.Parameter]], Norms]
"""From the norms of what is on this rank to those of whole gradients, the same on all ranks; by the trained parameters."""


class AdamW:
    """A 16-bit weight is its fp32 master, rounded; an fp32 weight is its own master. Gradients are the holding `grads`, the state `master` and `moments`.

    Where ranks share parameters out among them, each steps what it has, by the norm of the whole gradient.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        residency: Residency,
        total: Total = lambda norms, _: norms,
    ) -> None:
        self._config, self._residency, self._total = config, residency, total
        self._trained = [
            # Decay is for matrices; norms and biases have none.
            Trained(name, weight, config.weight_decay if weight.ndim >= 2 else 0.0)
            for name, weight in named_parameters
            if weight.requires_grad
        ]
        for one in self._trained:
            if one.weight.dtype not in (torch.float32, torch.bfloat16) or not one.weight.is_contiguous():
                raise ValueError(
                    f"{one.name} is {one.weight.dtype}, strides {one.weight.stride()}: trained weights are contiguous float32 or bfloat16"
                )
        gpu_part, cpu_part = shared_out([one.count for one in self._trained], config.on_cpu)
        self._parts: list[Part] = []
        if gpu_part:
            way = Streamed if config.place == "streamed" else OnDevice
            self._parts.append(way(self._trained, gpu_part, config, residency))
        if cpu_part:
            self._parts.append(OnCpu(self._trained, cpu_part, config, residency))
        if config.grad_dtype == "float32":
            for one in self._trained:
                one.weight.grad_dtype = torch.float32
        trained = self._trained
        residency.hold("grads", lambda: [local(one.weight.grad) for one in trained if one.weight.grad is not None])
        self.about = [part.about() for part in self._parts if isinstance(part, OnCpu)]
        """What a person should know of it before the run."""
        self.skipped: str | None = None
        """The first parameter whose gradient was not finite, where the last step was skipped for it."""

    @torch.no_grad()
    def step(self, lr: float) -> dict[str, float]:
        """Clips, steps and clears the gradients; says the norm of the whole gradient before the clip.

        The norm is known before anything changes. Where it is not finite, weights and state stay as they were (unless the config says to ignore it).
        """
        self._residency.need("grads")
        here = sorted(norm for part in self._parts for norm in part.norms())
        norms = self._total(here, [one.weight for one in self._trained])
        norm = math.hypot(*(value for _, value in norms))
        bad = next((number for number, value in norms if not math.isfinite(value)), None)
        self.skipped = None if bad is None else self._trained[bad].name
        if self.skipped is not None and self._config.check_for_nan_in_grad == "stop":
            self.discard()
            raise UserError(
                f"the gradient is not finite, first in {self.skipped}: lower `optimizer.lr`, or set `optimizer.check_for_nan_in_grad: skip` to go on "
                "without such steps. Weights and optimizer are as they were before it"
            )
        if self.skipped is None or self._config.check_for_nan_in_grad == "ignore":
            self.skipped = None
            # A gradient that is not finite, and is to be ignored, does not change what the clip leaves of the others.
            self._step(lr, math.hypot(*(value for _, value in norms if math.isfinite(value))), {number for number, _ in norms})
        self.discard()
        return {"grad_norm": norm, "lr": lr, "updates_skipped": float(self.skipped is not None)}

    def _state_holdings(self) -> list[Name]:
        state: tuple[Name, ...] = ("weights", "master", "moments")
        return [name for name in state if self._residency.holds(name)]  # there is no master where all weights are fp32

    @property
    def steps(self) -> dict[str, int]:
        """That each parameter has taken."""
        return {one.name: one.steps for one in self._trained}

    def state(self) -> dict[str, Stored]:
        """Masters and moments as they are stored: the same whatever the mode. An fp32 weight has no master beside it."""
        pieces: dict[int, list[tuple[Segment, Tensor, State]]] = {}
        for part in self._parts:
            for segment, weight, state in part.stretches():
                pieces.setdefault(segment.parameter, []).append((segment, weight, state))
        moments = moment_type(self._config)
        kinds: tuple[tuple[Kind, torch.dtype], ...] = (("master", torch.float32), ("first", moments), ("second", moments))
        return {
            f"{kind}/{one.name}": Stored(kind, one.region, dtype, pieces.get(number, []))
            for number, one in enumerate(self._trained)
            for kind, dtype in kinds
            if kind != "master" or one.weight.dtype != torch.float32
        }

    @torch.no_grad()
    def restore(self, read: Iterable[Mapping[str, Tensor]], steps: Mapping[str, int]) -> None:
        """Sets masters, moments, steps, and the weights that follow from masters; fp32 weights are their own and are set already.

        What is read comes by a few parameters at a time, so that not all of it is in memory beside what it is copied to.
        """
        numbers = {one.name: number for number, one in enumerate(self._trained)}
        for one in self._trained:
            one.steps = steps[one.name]
        with self._residency.changing(*self._state_holdings()):
            for tensors in read:
                found = {}
                for name in dict.fromkeys(name.split("/", 1)[1] for name in tensors):
                    one = self._trained[numbers[name]]
                    master = tensors[f"master/{name}"] if one.weight.dtype != torch.float32 else one.flat.cpu()
                    found[numbers[name]] = Exact(master, tensors[f"first/{name}"], tensors[f"second/{name}"])
                for part in self._parts:
                    part.restore(found)

    def discard(self) -> None:
        """Lets go of the gradients, wherever they are."""
        for one in self._trained:  # also where this rank has no element of it: the gradient may be a view of others'
            one.weight.grad = None
        for part in self._parts:
            if isinstance(part, OnCpu):
                part.clear()
        self._residency.dropped("grads")

    def _step(self, lr: float, norm: float, numbers: set[int]) -> None:
        clip = self._config.clip_norm
        scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        rules = {}
        for number in numbers:
            one = self._trained[number]
            rules[number] = Rule(self._config, lr, one.decay, one.steps + 1, scale, number)
        with self._residency.changing(*self._state_holdings()):
            for number in numbers:
                self._trained[number].steps += 1
            since = self._residency.mover.mark()
            for part in self._parts:
                part.step(rules, since)
