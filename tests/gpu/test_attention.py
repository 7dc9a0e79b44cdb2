"""Packed attention on the GPU: the varlen kernel against plain attention in float64, and whole families in bf16."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from conftest import FAMILIES, family
from ebbtide.model.load import load_model
from ebbtide.policy.attention import packed_attention
from ebbtide.policy.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_equals_plain_attention_within_each_sequence(dtype, window, kv_heads) -> None:
    lengths = [1, 37, 300, 64]
    starts = torch.tensor([0, 1, 38, 338, 402], dtype=torch.int32, device="cuda")
    query = torch.randn(1, 8, 402, 64, device="cuda", dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, 402, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    found, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        scaling=0.1,
        sliding_window=window,
        cu_seq_lens_q=starts,
        max_length_q=300,
    )
    parts = []
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        own = [tensor[:, :, begin : begin + length].double() for tensor in (query, key, value)]
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        mask = mask if window is None else mask.triu(-(window - 1))
        parts.append(scaled_dot_product_attention(*own, attn_mask=mask, scale=0.1, enable_gqa=True))
    wanted = torch.cat(parts, 2).transpose(1, 2)
    mix = torch.randn_like(wanted)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-3  # fp32 products may run in tf32
    for ours, reference in zip(
        (found, *torch.autograd.grad((found * mix).sum(), (query, key, value))),
        (wanted, *torch.autograd.grad((wanted * mix).sum(), (query, key, value))),
        strict=True,
    ):
        assert ((ours.double() - reference.double()).norm() / reference.double().norm()).item() < close


@pytest.mark.parametrize("name", FAMILIES)
def test_families_verify_themselves_in_bfloat16(tiny, name) -> None:
    config = tiny({**family(name), "device": "cuda"})
    policy = Policy(load_model(config), config)
    assert policy.model.dtype == torch.bfloat16
    policy.verify()
