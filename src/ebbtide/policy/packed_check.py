"""Checks before the first step that the log-probs of packed sequences are those of each sequence alone.

1. Another sequence changes nothing. A pack is computed again with other tokens in the neighbours of a sequence, before
   and after it: the shapes are the same, and so its log-probs have to be, to the bit in 16 bits and to 1e-5 nats in
   float32. Nothing is compared with the model's own forward here, so that no distance from it can hide a neighbour's
   influence. Only the matmuls of experts have as many rows as tokens chose them: where these are so computed that a
   sum depends on that, a model of 16 bits may move by its rounding, and by 1e-5 nats in float32.
2. They are the model's own: those of its own forward of each sequence alone, in float32 to 1e-5 nats on average, or
   what `SAME_ON_GPU` says.

A model of 16 bits is run for both in float32 (widened.py), with transformers' own blocks: that shows what it computes,
such as a window, a cap or a state. The kernels of 16 bits that training runs are compared with the
model's own forward in 16 bits, to a few times its distance from float32: an error of a kernel that is smaller than that
is not seen here, but by the tests of that kernel. A model that is sharded or quantized is not widened: 0.1 nats are
allowed then, which leaves masks and states to the checks of probe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.model.load import logit_scaling
from ebbtide.model.output_head import head_matrix
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.fuse import own_forwards
from ebbtide.policy.head import token_logprobs
from ebbtide.policy.probe import SHORT, ProbeSequence, own_logprobs, packed_hidden
from ebbtide.policy.widened import can_widen, in_float32

SAME = 1e-5  # Nats, for log-probs of up to 4 nats: in float32 two ways to compute them are 2e-7 apart, and 5e-6 for 15.
# On a GPU, where that is not measured: in float32 by widening, where no product is rounded to TF32, and by its kernels
# for models of float32, of which some may.
SAME_ON_GPU = {"widened": 1e-4, "kernels": 1e-3}
FLOOR = 0.02  # Nats that a kernel of 16 bits may differ from the model's own forward by, in addition to
ROUNDINGS = 4  # so many times the distance of that forward from float32, which is 0.05 to 0.14 in a model of 0.5B.
UNKNOWN = 0.1  # Nats where that distance cannot be measured.
LONGEST_WIDE = 1280  # Tokens of a sequence in float32: attention makes the square of them there, by head.

Pack = list[ProbeSequence]
Packed = Callable[[Pack], list[Tensor]]
"""Computes the log-probs of each completion of a pack."""


def neighbour_packs(both: tuple[ProbeSequence, ProbeSequence]) -> list[Pack]:
    """A pack of three sequences, the long one between two short ones; the same with other tokens in the outer ones; and
    with others in the middle. The others are all the same token, one of the sequence that is looked at: where experts
    have room for so many tokens each, they run out of it."""
    long, first = both
    last = ProbeSequence(first.tokens[::-1][:1], first.tokens[::-1][1:])
    outer, inner = long.tokens[0], first.tokens[0]
    return [
        [first, long, last],
        [_repeated(outer, first), long, _repeated(outer, last)],
        [first, _repeated(inner, long), last],
    ]


def _repeated(token: int, like: ProbeSequence) -> ProbeSequence:
    return ProbeSequence([token] * len(like.prompt), [token] * len(like.completion))


def moved(found: Sequence[Sequence[Tensor]]) -> Tensor:
    """How far each log-prob moved when its neighbours changed; `found`: those of `neighbour_packs`."""
    whole, others, middle = found
    same = [(whole[0], middle[0]), (whole[1], others[1]), (whole[2], middle[2])]
    return torch.cat([(one - other).abs() for one, other in same])


def check_packed(
    model: PreTrainedModel, attention: str, packs: Sequence[Pack], found: Sequence[Sequence[Tensor]]
) -> None:
    """Refuses a model whose packed log-probs are not those of each sequence alone. `found`: the log-probs of
    `neighbour_packs`, computed as in training; `attention`: that of the model's own forward."""
    own = [own_logprobs(model, attention, one) for one in packs[0]]
    allowed = tolerance(model, attention, packs[0], own)
    exact = model.dtype == torch.float32
    by_neighbours = moved(found).max() if exact else moved(found).mean()
    _check(model, torch.cat([*found[0]]), torch.cat(own), allowed, by_neighbours, allowed_move(model, allowed))
    if exact or not can_widen(model):
        return
    short = [[_shortened(one) for one in pack] for pack in packs]
    if not moved(found).any():  # Neighbours change no bit in 16 bits: there is no more to see in float32.
        short = short[:1]
    with in_float32(model):
        wide = [widened_logprobs(model, pack) for pack in short]
        own = [own_logprobs(model, attention, one) for one in short[0]]
    by_neighbours = moved(wide).max() if len(wide) > 1 else torch.zeros(())
    _check(model, torch.cat(wide[0]), torch.cat(own), same(own, "widened"), by_neighbours, SAME)


def _check(
    model: PreTrainedModel, found: Tensor, own: Tensor, allowed: float, by_neighbours: Tensor, move: float
) -> None:
    kind = type(model).__name__
    if not by_neighbours <= move:
        raise UserError(
            f"{kind}: log-probs of a sequence move by {by_neighbours:.3g} when the tokens of another in the same pack"
            " change: it computes something over all tokens of a batch, such as a mean, a state or experts that drop"
            " tokens when others take their place, which is not supported. Choose another model"
        )
    difference = (found - own).abs().mean().item()
    if not difference <= allowed:
        raise UserError(
            f"{kind}: log-probs of packed sequences differ from the model's own by {difference:.3g} on average, more"
            f" than rounding ({allowed:.2g}): this architecture does something in its attention, or between its layers"
            " and its logits, that is not supported. Choose another model"
        )


def allowed_move(model: PreTrainedModel, allowed: float) -> float:
    """How far log-probs may move when other sequences change; `allowed`: how far they may be from the model's own."""
    sizes = model.config.get_text_config().to_dict().items()
    experts = any("expert" in name and isinstance(size, int) and size > 1 for name, size in sizes)
    if model.dtype == torch.float32:
        return min(allowed, SAME)
    return allowed if experts else 0.0


def same(own: Sequence[Tensor], by: Literal["widened", "kernels"] = "kernels") -> float:
    """How far log-probs in float32 may be from these on average: in proportion to their size, as rounding is."""
    unit = SAME if own[0].device.type == "cpu" else SAME_ON_GPU[by]
    return unit * max(1.0, torch.cat([*own]).abs().mean().item() / 4)


def tolerance(
    model: PreTrainedModel,
    attention: str,
    sequences: Sequence[ProbeSequence],
    own: Sequence[Tensor],
    unknown: float = UNKNOWN,
) -> float:
    """How far log-probs may be from those of the model's own forward (`own`) of these sequences on average. `unknown`:
    in 16 bits, where its rounding cannot be measured."""
    if model.dtype == torch.float32:
        return same(own)
    measured = [(one, found) for one, found in zip(sequences, own, strict=True) if len(one.tokens) <= LONGEST_WIDE]
    if not measured or not can_widen(model):
        return unknown
    with in_float32(model):
        off = [(own_logprobs(model, attention, one) - found).abs() for one, found in measured]
    return FLOOR + ROUNDINGS * torch.cat(off).mean().item()


@torch.no_grad()
def widened_logprobs(model: PreTrainedModel, pack: Pack) -> list[Tensor]:
    """The log-probs of each completion of a pack, of a model `in_float32`, with transformers' own blocks."""
    with use_attention(model, PACKED), own_forwards(model):
        hidden = packed_hidden(model, [one.tokens for one in pack])
    matrix, bias = head_matrix(model)
    assert isinstance(matrix, Tensor)  # Numbers can be widened.
    weight, bias = matrix.float(), None if bias is None else bias.float()
    scale, softcap = logit_scaling(model.config)
    found, end = [], 0
    for one in pack:
        end += len(one.tokens)
        targets = torch.tensor(one.completion, device=hidden.device)
        before = hidden[end - 1 - len(targets) : end - 1]
        found.append(token_logprobs(before, weight, bias, targets, scale=scale, softcap=softcap)[0])
    return found


def _shortened(one: ProbeSequence) -> ProbeSequence:
    """A sequence that is not too long for float32."""
    return one if len(one.tokens) <= LONGEST_WIDE else replace(one, prompt=one.prompt[:SHORT])
