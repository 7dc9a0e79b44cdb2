"""Packed attention on the GPU: the varlen kernel against plain attention in float64, and whole families in bf16."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from conftest import FAMILIES, family
from ebbtide.model.attention_kind import AttentionKind, attend
from ebbtide.model.load import load_model
from ebbtide.policy.attention import packed_attention
from ebbtide.policy.packed_attention import PackedAttention
from ebbtide.policy.policy import Policy
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Request, SamplingParams
from families import family_model

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


def relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(("channels", "value_channels"), [(64, 64), (192, 128), (512, 512)])
@pytest.mark.parametrize("name", ["plain", "chunk", "softcap", "sinks", "sinks and window"])
def test_kinds_of_attention_are_those_of_plain_torch(name, channels, value_channels) -> None:
    """By flash kernels with starts, values and sums of their own, by flex attention, or by plain attention."""
    starts = torch.tensor([0, 1, 38, 338, 402], dtype=torch.int32, device="cuda")
    sinks = torch.linspace(-1, 2, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kind = {
        "plain": AttentionKind(),
        "chunk": AttentionKind(chunk=50),
        "softcap": AttentionKind(window=70, softcap=1.5),
        "sinks": AttentionKind(sinks=sinks),
        "sinks and window": AttentionKind(window=70, sinks=sinks),
    }[name]
    given = [
        torch.randn(402, *size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in ((8, channels), (2, channels), (2, value_channels))
    ]
    inputs = [*given, *([sinks] if kind.sinks is not None else [])]
    found = PackedAttention(starts, 300, 0.1, kind).mix(*given)
    parts = []
    for begin, end in pairwise(starts.tolist()):
        q, k, v = (one[begin:end].transpose(0, 1)[None].double() for one in given)
        place = torch.arange(end - begin, device="cuda")
        parts.append(attend(q, k, v, kind.sees(place[:, None], place), 0.1, kind)[0].transpose(0, 1))
    wanted = torch.cat(parts)
    mix = torch.randn_like(wanted)
    assert relative(found, wanted) < 1e-2
    for ours, theirs in zip(
        torch.autograd.grad((found * mix).sum(), inputs),
        torch.autograd.grad((wanted * mix).sum(), inputs),
        strict=True,
    ):
        assert relative(ours, theirs) < 2e-2


KINDS = ("gemma2", "gpt_oss", "mimo_v2_flash", "llama4_text", "deepseek_v3", "gemma3n_text", "gemma4_text")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_families_with_attention_of_their_own_train_and_sample(tiny, name, dtype) -> None:
    loaded = family_model(name, dtype)
    loaded.model.to("cuda")
    lengths = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 16, "rollout.max_num_seqs": 8}
    config = tiny({**lengths, "device": "cuda", "model.dtype": str(dtype).removeprefix("torch.")})
    Policy(loaded, config).verify()
    engine = build_engine(loaded, config, lambda size: None)
    (group,) = engine.generate(
        [Request([3, 4, 5, 6, 7, 8, 9], [1, 2])], SamplingParams(14, ignore_eos=True), lambda *_: None
    )
    for sample in group:
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, *sample.tokens]], device="cuda")
        with torch.no_grad():
            rows = loaded.model(ids, use_cache=False).logits[0, 6:-1].float().log_softmax(-1)
        own = rows.gather(-1, ids[0, 7:, None])[:, 0].cpu()
        assert (own - torch.tensor(sample.logprobs)).abs().mean() < (0.1 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_verify_themselves_in_bfloat16(tiny, name) -> None:
    config = tiny({**family(name), "device": "cuda"})
    policy = Policy(load_model(config), config)
    assert policy.model.dtype == torch.bfloat16
    policy.verify()
