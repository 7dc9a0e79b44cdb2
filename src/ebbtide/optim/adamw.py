"""AdamW with fp32 masters: one interface wherever its state lives (on the device, streamed through it, on the CPU, or
split between them)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.gauge import mark
from ebbtide.memory.plan import HoldingName
from ebbtide.memory.residency import Residency
from ebbtide.optim.backend import FullState, Kind, OptimizerBackend, TrainedParameter, moment_dtype, read_full_state
from ebbtide.optim.layout import Segment, split_gpu_cpu
from ebbtide.optim.on_cpu import CpuBackend
from ebbtide.optim.on_device import DeviceBackend
from ebbtide.optim.rule import AdamWState, Rule
from ebbtide.optim.streamed import StreamedBackend
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.dtensor import Region, local

GRAD_MARKS = 8  # moments of a backward at which the growing gradients are measured


@dataclass(frozen=True)
class StoredState:
    """A master or a moment of one parameter, in the pieces in which it is stored."""

    kind: Kind
    region: Region
    """This rank's part of the parameter."""
    dtype: torch.dtype
    pieces: Sequence[tuple[Segment, Tensor, AdamWState]]

    @torch.no_grad()
    def fill(self, out: Tensor, at: Callable[[Tensor], Tensor]) -> None:
        """Writes it into a flat tensor on the host; `at` maps a tensor to the one its bytes are read from."""
        for segment, weight, state in self.pieces:
            low = None if state.low is None else at(state.low)
            there = AdamWState(low, at(state.first), at(state.second)).part(
                segment.offset, segment.offset + segment.size
            )
            out[segment.start : segment.stop] = read_full_state(self.kind, at(weight).to(there.second.device), there)


class AdamW:
    """A 16-bit weight is its fp32 master, rounded; an fp32 weight is its own master. Gradients are the holding
    `grads`, the state is the holdings `master` and `moments`.

    Where parameters are sharded, each rank steps its own shards, with the norm of the whole gradient.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        residency: Residency,
        comm: Comm | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._residency, self._comm = config, residency, comm or Comm()
        self._trained = [
            # Weight decay is for matrices; norms and biases have none.
            TrainedParameter(name, weight, config.weight_decay if weight.ndim >= 2 else 0.0)
            for name, weight in named_parameters
            if weight.requires_grad
        ]
        for one in self._trained:
            if one.weight.dtype not in (torch.float32, torch.bfloat16) or not one.weight.is_contiguous():
                raise ValueError(
                    f"{one.name} is {one.weight.dtype}, strides {one.weight.stride()}:"
                    " trained weights must be contiguous float32 or bfloat16"
                )
        gpu_part, cpu_part = split_gpu_cpu([one.numel for one in self._trained], config.cpu_share)
        self._backends: list[OptimizerBackend] = []
        if gpu_part:
            backend = StreamedBackend if config.place == "streamed" else DeviceBackend
            self._backends.append(backend(self._trained, gpu_part, config, residency))
        if cpu_part:
            on_cpu = CpuBackend(self._trained, cpu_part, config, residency)
            self._backends.append(on_cpu)
            note(on_cpu.describe())
        if config.grad_dtype == "float32":
            for one in self._trained:
                one.weight.grad_dtype = torch.float32
        trained = self._trained
        residency.register("grads", lambda: [local(one.weight.grad) for one in trained if one.weight.grad is not None])
        for one in _evenly_spaced(trained, GRAD_MARKS):  # so that the peak of a backward is told from its end
            one.weight.register_post_accumulate_grad_hook(lambda _: mark())
        self.skipped_for: str | None = None
        """The first parameter whose gradient was not finite, if the last step was skipped because of it."""

    @torch.no_grad()
    def step(self, lr: float) -> dict[str, float]:
        """Clips the gradients, steps, and clears them; returns the global gradient norm before clipping.

        The norm is known before anything changes. Where it is not finite, weights and state stay as they were
        (unless `optimizer.check_for_nan_in_grad` is `ignore`).
        """
        self._residency.need("grads")
        local_norms = sorted(norm for backend in self._backends for norm in backend.norms())
        norms = self._comm.global_norms(local_norms, [one.weight for one in self._trained])
        norm = math.hypot(*(value for _, value in norms))
        bad = next((number for number, value in norms if not math.isfinite(value)), None)
        self.skipped_for = None if bad is None else self._trained[bad].name
        if self.skipped_for is not None and self._config.check_for_nan_in_grad == "stop":
            self.discard_grads()
            raise UserError(
                f"the gradient is not finite, first in {self.skipped_for}: lower `optimizer.lr`,"
                " or set `optimizer.check_for_nan_in_grad: skip` to continue without such steps."
                " Weights and optimizer are as they were before this step"
            )
        if self.skipped_for is None or self._config.check_for_nan_in_grad == "ignore":
            self.skipped_for = None
            # A gradient that is not finite and is ignored does not change how the others are clipped.
            finite_norm = math.hypot(*(value for _, value in norms if math.isfinite(value)))
            self._step(lr, finite_norm, {number for number, _ in norms})
        self.discard_grads()
        return {"grad_norm": norm, "lr": lr, "updates_skipped": float(self.skipped_for is not None)}

    def _state_holdings(self) -> list[HoldingName]:
        state: tuple[HoldingName, ...] = ("weights", "master", "moments")
        return [name for name in state if self._residency.has(name)]  # no `master` where all weights are fp32

    @property
    def steps(self) -> dict[str, int]:
        """The number of steps that each parameter has taken."""
        return {one.name: one.steps for one in self._trained}

    def state(self) -> dict[str, StoredState]:
        """The masters and moments as a checkpoint stores them: the same for every backend. An fp32 weight has no
        separate master."""
        pieces: dict[int, list[tuple[Segment, Tensor, AdamWState]]] = {}
        for backend in self._backends:
            for segment, weight, state in backend.slices():
                pieces.setdefault(segment.parameter, []).append((segment, weight, state))
        moments = moment_dtype(self._config)
        kinds: tuple[tuple[Kind, torch.dtype], ...] = (
            ("master", torch.float32),
            ("first", moments),
            ("second", moments),
        )
        return {
            f"{kind}/{one.name}": StoredState(kind, one.region, dtype, pieces.get(number, []))
            for number, one in enumerate(self._trained)
            for kind, dtype in kinds
            if kind != "master" or one.weight.dtype != torch.float32
        }

    @torch.no_grad()
    def restore(self, read: Iterable[Mapping[str, Tensor]], steps: Mapping[str, int]) -> None:
        """Sets masters, moments, steps, and the weights that follow from masters; fp32 weights are their own masters
        and are set already.

        `read` yields a few parameters at a time, so that the state is never in memory twice.
        """
        numbers = {one.name: number for number, one in enumerate(self._trained)}
        for one in self._trained:
            one.steps = steps[one.name]
        with self._residency.writing(*self._state_holdings()):
            for tensors in read:
                found = {}
                for name in dict.fromkeys(name.split("/", 1)[1] for name in tensors):
                    one = self._trained[numbers[name]]
                    master = tensors[f"master/{name}"] if one.weight.dtype != torch.float32 else one.flat.cpu()
                    found[numbers[name]] = FullState(master, tensors[f"first/{name}"], tensors[f"second/{name}"])
                for backend in self._backends:
                    backend.restore(found)

    def discard_grads(self) -> None:
        """Frees the gradients, wherever they are."""
        for one in self._trained:  # also where this rank's shard is empty: its gradient may be a view of others'
            one.weight.grad = None
        for backend in self._backends:
            if isinstance(backend, CpuBackend):
                backend.clear()
        self._residency.forget("grads")

    def _step(self, lr: float, norm: float, numbers: set[int]) -> None:
        """Steps the parameters of these numbers; `norm` is the global gradient norm that clipping is based on."""
        clip = self._config.clip_norm
        scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        rules = {}
        for number in numbers:
            one = self._trained[number]
            rules[number] = Rule(self._config, lr, one.decay, one.steps + 1, scale, number)
        with self._residency.writing(*self._state_holdings()):
            for number in numbers:
                self._trained[number].steps += 1
            since = self._residency.mover.mark()
            for backend in self._backends:
                backend.step(rules, since)


def _evenly_spaced(trained: Sequence[TrainedParameter], count: int) -> list[TrainedParameter]:
    """The parameters at which the gradients have grown by one more part in `count`."""
    total, done, found = sum(one.numel for one in trained), 0, []
    for one in trained:
        if (done + one.numel) * count // max(1, total) > done * count // max(1, total):
            found.append(one)
        done += one.numel
    return found
