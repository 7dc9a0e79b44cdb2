"""Attention in plain torch against transformers' own functions, kind by kind."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ebbtide.model.attention_kind import AttentionKind, attend

HEADS, KV_HEADS, TOKENS = 4, 2, 11


def states(value_channels: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (HEADS, 8), (KV_HEADS, 8), (KV_HEADS, value_channels)
    return [3 * torch.randn(2, heads, TOKENS, channels) for heads, channels in sizes]


def test_a_soft_cap_is_that_of_gemma_2() -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    kind = AttentionKind(window=4, softcap=2.0)
    seen = kind.sees(torch.arange(TOKENS)[:, None], torch.arange(TOKENS))
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    wanted, _ = eager_attention_forward(module, *states(), mask, scaling=0.4, softcap=2.0)
    torch.testing.assert_close(attend(*states(), seen, 0.4, kind).transpose(1, 2), wanted, atol=1e-6, rtol=1e-6)


def test_sinks_are_those_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    sinks = torch.tensor([0.5, -1.0, 4.0, 0.0])
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=sinks)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    wanted, _ = eager_attention_forward(module, *states(5), mask, scaling=0.4)
    found = attend(*states(5), None, 0.4, AttentionKind(sinks=sinks))
    torch.testing.assert_close(found.transpose(1, 2), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (AttentionKind(), [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (
            AttentionKind(window=2),
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]],
        ),
        (AttentionKind(chunk=2), [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]),
    ],
    ids=["causal", "window", "chunk"],
)
def test_tokens_see_those_of_their_window_or_chunk(kind, wanted) -> None:
    place = torch.arange(5)
    assert kind.sees(place[:, None], place).int().tolist() == wanted
    assert kind.within(5).sees(place[:, None], place).int().tolist() == wanted
    assert (kind.within(2).window, kind.within(2).chunk) == (None, None)  # no sequence of two tokens reaches beyond
