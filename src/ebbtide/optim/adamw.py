"""AdamW on the device: fp32 moments, and fp32 master weights where the weights are 16-bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.buckets import buckets
from ebbtide.memory.residency import Residency

CHUNK = 256 * 2**20  # elements whose gradients are in fp32 at once


@dataclass
class _Entry:
    """One parameter and its state. The number of its steps stays on the host."""

    weight: nn.Parameter
    master: Tensor
    """fp32; the weight itself where that is fp32."""
    first: Tensor
    second: Tensor
    decay: float
    steps: int = 0


class AdamW:
    """torch's fused AdamW on fp32 masters. A 16-bit weight is its master, rounded; an fp32 weight is its own master.

    The state is held in buckets by the residency, as `master` and `moments`; gradients are the holding `grads`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, residency: Residency) -> None:
        self._config, self._residency = config, residency
        weights = [parameter for _, parameter in named_parameters if parameter.requires_grad]
        shapes, device = [weight.shape for weight in weights], residency.device
        firsts, seconds = buckets(shapes, torch.float32, device), buckets(shapes, torch.float32, device)
        for flat in (*firsts[0], *seconds[0]):
            flat.zero_()
        narrow = [weight.shape for weight in weights if weight.dtype != torch.float32]
        master_buckets, master_views = buckets(narrow, torch.float32, device)
        views = iter(master_views)
        masters = [weight.detach() if weight.dtype == torch.float32 else next(views).copy_(weight.detach()) for weight in weights]
        self._entries = [
            # Decay is for matrices; norms and biases have none.
            _Entry(weight, master, first, second, config.weight_decay if weight.ndim >= 2 else 0.0)
            for weight, master, first, second in zip(weights, masters, firsts[1], seconds[1], strict=True)
        ]
        self._has_master = bool(narrow)
        residency.hold("grads", lambda: [weight.grad for weight in weights if weight.grad is not None])
        residency.hold("moments", [*firsts[0], *seconds[0]])
        if self._has_master:
            residency.hold("master", master_buckets)

    @torch.no_grad()
    def step(self, lr: float) -> dict[str, float]:
        """Clips, steps and clears the gradients; says the norm of the whole gradient before the clip.

        A norm that is not finite takes no step: weights and state stay as they were, and the skip is counted.
        """
        self._residency.need("grads", write=True)
        entries = [entry for entry in self._entries if entry.weight.grad is not None]
        norm = _norm([entry.weight.grad for entry in entries], self._residency.device)
        finite = bool(norm.isfinite())
        if finite:
            if self._has_master:
                self._residency.need("master", write=True)
            self._residency.need("moments", write=True)
            for chunk in _chunks(entries):
                self._update(chunk, lr, self._clip_scale(norm))
        self.zero_grad()
        return {"grad_norm": float(norm), "lr": lr, "updates_skipped": float(not finite)}

    def _update(self, entries: Sequence[_Entry], lr: float, scale: Tensor | None) -> None:
        """One chunk: gradients to fp32 and clipped, AdamW on the masters, masters rounded into the weights."""
        gradients = [entry.weight.grad.float() for entry in entries if entry.weight.grad is not None]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
        for (decay, steps), places in groupby(range(len(entries)), key=lambda i: (entries[i].decay, entries[i].steps)):
            group = list(places)
            count = torch.full((), steps + 1, dtype=torch.float32, device=self._residency.device)
            torch._fused_adamw_(
                [entries[i].master for i in group],
                [gradients[i] for i in group],
                [entries[i].first for i in group],
                [entries[i].second for i in group],
                [],
                [count] * len(group),
                lr=lr,
                beta1=self._config.betas[0],
                beta2=self._config.betas[1],
                weight_decay=decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
            )
        for entry in entries:
            entry.steps += 1
        rounded = [entry for entry in entries if entry.weight.dtype != torch.float32]
        if rounded:
            torch._foreach_copy_([entry.weight for entry in rounded], [entry.master for entry in rounded])

    def _clip_scale(self, norm: Tensor) -> Tensor | None:
        if self._config.clip_norm is None:
            return None
        return (self._config.clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def zero_grad(self) -> None:
        for entry in self._entries:
            entry.weight.grad = None
        self._residency.dropped("grads")


def _norm(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The norm of all gradients together, in fp32 whatever their type."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients if gradient is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def _chunks(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Parameters of alike decay and steps side by side, in runs of at most CHUNK elements (a larger parameter is a run of its own)."""
    chunk: list[_Entry] = []
    size = 0
    for entry in sorted(entries, key=lambda entry: (entry.decay, entry.steps)):
        if chunk and size + entry.weight.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry.weight.numel()
    if chunk:
        yield chunk
