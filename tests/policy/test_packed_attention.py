"""What packed attention does around a GPU's kernels, with plain torch in their place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.model.attention_kind import AttentionKind, attend
from ebbtide.policy import packed_attention, packed_flex
from ebbtide.policy.packed_attention import PackedAttention

LENGTHS = [1, 37, 20, 6]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def scores_of(query: Tensor, key: Tensor, starts: Tensor, window: tuple[int, int], scale: float) -> Tensor:
    """[heads, T, T]: minus infinity between tokens that do not see each other."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    place = torch.arange(len(query))
    sequence = torch.searchsorted(starts, place, right=True)
    before = place[:, None] - place
    seen = (before >= 0) & (sequence[:, None] == sequence) & ((window[0] < 0) | (before <= window[0]))
    return (torch.einsum("qhc,khc->hqk", query, keys) * scale).masked_fill(~seen, -torch.inf)


def plain_forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """What flash kernels compute, which take values with as many channels as keys."""
    assert value.shape[-1] == query.shape[-1]
    scores = scores_of(query, key, given["starts"], given["window"], given["scale"])
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return torch.einsum("hqk,khc->qhc", scores.softmax(-1), values), scores.logsumexp(-1)


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, **given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As flash kernels do: the weights from the sums of exp, and no softmax again."""
    each = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(each, 1) for one in (key, value))
    weights = (scores_of(query, key, given["starts"], given["window"], given["scale"]) - sums[..., None]).exp()
    delta = (grad * mixed).sum(-1).T[..., None]
    dscores = weights * (torch.einsum("qhc,khc->hqk", grad, values) - delta) * given["scale"]
    dquery = torch.einsum("hqk,khc->qhc", dscores, keys)
    dkey = torch.einsum("hqk,qhc->khc", dscores, query)
    dvalue = torch.einsum("hqk,qhc->khc", weights, grad)
    return dquery, *(one.unflatten(1, (key.shape[1], each)).sum(2) for one in (dkey, dvalue))


def plain_varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: object, **given: Any) -> Tensor:
    return plain_forward(query, key, value, starts=starts, window=given["window_size"], scale=given["scale"])[0]


def one_by_one(kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each sequence alone."""
    parts = []
    for states in zip(*(one.split(LENGTHS) for one in (query, key, value)), strict=True):
        q, k, v = (one.transpose(0, 1)[None] for one in states)
        place = torch.arange(q.shape[2])
        parts.append(attend(q, k, v, kind.sees(place[:, None], place), 0.3, kind)[0].transpose(0, 1))
    return torch.cat(parts)


def states(value_channels: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (4, 16), (2, 16), (2, value_channels)
    return [torch.randn(sum(LENGTHS), *size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("value_channels", [16, 12])
@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(),
        AttentionKind(window=5),
        AttentionKind(chunk=7),
        AttentionKind(chunk=10, window=4),
        AttentionKind(sinks=SINKS),
        AttentionKind(window=5, sinks=SINKS),
        AttentionKind(chunk=7, sinks=SINKS),
        AttentionKind(softcap=0.7),
        AttentionKind(chunk=7, softcap=0.7, sinks=SINKS),
    ],
    ids=lambda kind: ", ".join(
        name for name in ("window", "chunk", "softcap", "sinks") if getattr(kind, name) is not None
    ),
)
@pytest.mark.parametrize("flash", [True, False])
def test_mixed_values_and_gradients_are_those_of_each_sequence(monkeypatch, kind, value_channels, flash) -> None:
    monkeypatch.setattr(packed_attention, "has_flash", lambda *_: flash)
    monkeypatch.setattr(packed_attention, "flash_forward", plain_forward)
    monkeypatch.setattr(packed_attention, "flash_backward", plain_backward)
    monkeypatch.setattr(packed_attention, "_kernel", lambda: plain_varlen)
    given = states(value_channels)
    sinks = SINKS.double().requires_grad_()
    kind = AttentionKind(kind.window, kind.chunk, kind.softcap, sinks if kind.sinks is not None else None)
    inputs = [*given, *([sinks] if kind.sinks is not None else [])]
    found = PackedAttention(STARTS, max(LENGTHS), 0.3, kind).mix(*given)
    wanted = one_by_one(kind, *given)
    weights = torch.arange(wanted.numel()).sin().view_as(wanted)
    for mine, theirs in zip(
        (found, *torch.autograd.grad((found * weights).sum(), inputs)),
        (wanted, *torch.autograd.grad((wanted * weights).sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("lengths", [[300], [1, 130, 260, 128, 5, 128], [128, 128, 256]])
def test_blocks_of_the_mask_are_those_of_torchs_own_function(lengths, window) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    starts, tokens = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        near = row - column < (window or tokens)
        return (row >= column) & (sequence[row] == sequence[column]) & near

    wanted = create_block_mask(sees, None, None, tokens, tokens, device="cpu")
    found = packed_flex.block_mask(starts, tokens, window)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
    none = torch.tensor(0)
    assert torch.equal(found.mask_mod(none, none, row, column), sees(none, none, row, column))
    for counts in ("kv_num_blocks", "full_kv_num_blocks"):
        ours, theirs = getattr(found, counts), getattr(wanted, counts)
        assert torch.equal(
            ours[..., : tokens // 128], theirs[..., : tokens // 128]
        )  # torch counts a cut block as partly


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_soft_caps_by_flex_attention_are_those_of_plain_torch(monkeypatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(packed_flex, "_compiled", lambda: flex_attention)
    kind = AttentionKind(window=5, softcap=0.7)
    with torch.no_grad():
        given = [one.detach() for one in states(16)]
        found = packed_flex.flex(*given, STARTS, 0.3, kind)
        torch.testing.assert_close(found, one_by_one(kind, *given), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000, 8193, 16384, 20000, 65537])
def test_flex_attention_is_compiled_for_few_sizes(tokens) -> None:
    size = packed_flex.padded_size(tokens)
    assert tokens <= size <= max(1024, 1.25 * tokens)
    assert len({packed_flex.padded_size(some) for some in range(1, tokens + 1)}) <= 1 + 4 * max(
        0, tokens.bit_length() - 10
    )
