"""The output head's computation for each row of logits, in plain torch: the reference for logprob_kernels.py, and the
implementation on a CPU.

With x = scale * softcap * tanh(logits / softcap): lse = log sum exp x; log p = x - lse; entropy = -sum p log p.
"""

from __future__ import annotations

from torch import Tensor


def _shaped(logits: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(x [c, V] in fp32, its slope d x / d logits over `scale` if there is a softcap)."""
    x, slope = logits.float(), None
    if softcap is not None:
        curve = (x / softcap).tanh()
        x, slope = curve * softcap, 1 - curve.square()
    return (x * scale if scale != 1.0 else x), slope


def reduce(
    logits: Tensor,  # [c, V]
    targets: Tensor,  # [c]
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 log-sum-exp [c], log-prob of the target [c] and entropy [c] of each row."""
    x, _ = _shaped(logits, scale, softcap)
    lse = x.logsumexp(-1)
    logprobs = x - lse[:, None]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return lse, logprobs.gather(-1, targets[:, None])[:, 0], entropy


def gradient(
    logits: Tensor,  # [c, V]
    targets: Tensor,  # [c]
    lse: Tensor,  # [c]
    entropy: Tensor,  # [c]
    grad_logprob: Tensor,  # [c]
    grad_entropy: Tensor,  # [c]
    scale: float,
    softcap: float | None,
) -> Tensor:
    """d loss / d logits [c, V], in the logits' type: d log p_t / d x = [t] - p, and d entropy / d x = -p (log p +
    entropy)."""
    x, slope = _shaped(logits, scale, softcap)
    logprobs = x - lse[:, None]
    grad = -logprobs.exp() * (grad_entropy[:, None] * (logprobs + entropy[:, None]) + grad_logprob[:, None])
    grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None])
    if slope is not None:
        grad *= slope
    return (grad * scale).to(logits.dtype)
