"""AdamW on the device: fp32 moments, and fp32 master weights where the weights are 16-bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ebbtide.config.tree import Optimizer as OptimizerConfig


class AdamW:
    """torch's fused AdamW on fp32 masters. A 16-bit weight is its master, rounded; an fp32 weight is its own master."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self._config = config
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._weights = [parameter for _, parameter in trainable]
        self._masters = [weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float()) for weight in self._weights]
        matrices = [master for master in self._masters if master.ndim >= 2]
        vectors = [master for master in self._masters if master.ndim < 2]
        groups = [{"params": group, "weight_decay": decay} for group, decay in ((matrices, config.weight_decay), (vectors, 0.0)) if group]
        self._adam = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)

    @torch.no_grad()
    def step(self, lr: float) -> dict[str, float]:
        """Clips, steps and clears the gradients; says the norm of the whole gradient before the clip.

        A norm that is not finite takes no step: weights and state stay as they were, and the skip is counted.
        """
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        finite = bool(norm.isfinite())
        if finite:
            scale = self._clip_scale(norm)
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight.grad is not None:
                    gradient = weight.grad.float()
                    master.grad = gradient.mul_(scale) if scale is not None else gradient
                    if master is not weight:
                        weight.grad = None
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            for weight, master in zip(self._weights, self._masters, strict=True):
                if master is not weight:
                    weight.copy_(master)
        self.zero_grad()
        return {"grad_norm": float(norm), "lr": lr, "updates_skipped": float(not finite)}

    def _clip_scale(self, norm: Tensor) -> Tensor | None:
        if self._config.clip_norm is None:
            return None
        return (self._config.clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def zero_grad(self) -> None:
        for tensor in (*self._weights, *self._masters):
            tensor.grad = None
