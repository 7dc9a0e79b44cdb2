"""The kernels of exact mode: a token's bits do not depend on what is computed with it."""

import pytest
import torch
from test_paged_kernels import DEVICE, DTYPES, INTERPRETED, NEAR, Paged, integers, reference, table, tanh  # noqa: F401

from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.block_reference import Norm, Rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]


def same(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bits are the same. The interpreter multiplies matrices of other sizes in another order."""
    return torch.allclose(ours, wanted, atol=2e-6) if INTERPRETED else torch.equal(ours, wanted)


def reference_sums(query: torch.Tensor, key: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """The logs of the sums of exp [heads, T] of a sequence."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhc,khc->hqk", query.double(), keys.double()) * scale
    place = torch.arange(len(query), device=DEVICE)
    before = place[:, None] - place
    return scores.masked_fill((before < 0) | (before >= (window or len(query))), -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(4, 2, 24), (16, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_has_the_bits_of_training(heads, kv_heads, channels, norms, dtype) -> None:
    from ebbtide.model.rope_kernels import rotate
    from ebbtide.rollout.paged.cache_kernels import rope_and_write_cache

    torch.manual_seed(0)
    cache = Paged(kv_heads, channels, 16, dtype)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * channels, device=DEVICE).to(dtype)
    weights = tuple(torch.randn(channels, device=DEVICE).to(dtype) for _ in range(2)) if norms else None
    cos, sin = (torch.randn(5, channels, device=DEVICE).to(dtype) for _ in range(2))
    rotary = Rotary(heads, kv_heads, channels, weights, Norm(1e-6), cos, sin)
    slots = [3, 70, 71, 5, -1]
    query = rope_and_write_cache(qkv, rotary, cache.addresses, 1, integers(slots), 16)
    wanted_query, wanted_key = rotate(qkv, rotary)
    assert torch.equal(query, wanted_query)
    assert torch.equal(cache.at(1, 0, slots[:-1]), wanted_key[:-1])
    assert torch.equal(cache.at(1, 1, slots[:-1]), qkv.unflatten(1, (-1, channels))[:-1, -kv_heads:])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "window"),
    [(4, 2, 32, None), (16, 8, 128, None), (14, 2, 64, 40), (9, 3, 64, None), (2, 1, 256, 600)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_packed_by_chunks_and_token_by_token(
    heads, kv_heads, channels, window, dtype
) -> None:
    """Sequences of a group, packed as in training; their prompt and their own tokens read by chunks into a cache; and
    their last tokens alone, with the prompt read once for the group."""
    from ebbtide.model.attention_kernels import TILE, attend_packed, attend_to_cache
    from ebbtide.rollout.paged.cache_kernels import write_cache
    from ebbtide.rollout.paged.decode_kernels import decode

    kind = AttentionKind(window)
    if dtype == torch.float32 and channels == 256 and not INTERPRETED:
        pytest.skip("float32 with 256 channels takes more shared memory than a GPU has")
    torch.manual_seed(0)
    block, scale = 16, channels**-0.5
    cache = Paged(kv_heads, channels, block, dtype)
    lengths = [(5, [1, 3]), (200, [1, 130, 64]), (640, [1, 300]), (513, [40])]  # prompts, and samples' own tokens
    near = NEAR[dtype]
    for prompt, own_lengths in lengths:
        shared = [
            torch.randn(prompt, count, channels, device=DEVICE).to(dtype) for count in (heads, kv_heads, kv_heads)
        ]
        own = [
            [torch.randn(length, count, channels, device=DEVICE).to(dtype) for count in (heads, kv_heads, kv_heads)]
            for length in own_lengths
        ]
        sequences = [[torch.cat(both) for both in zip(shared, one, strict=True)] for one in own]
        query, key, value = (torch.cat(states) for states in zip(*sequences, strict=True))
        starts = integers([0, *(prompt + length for length in own_lengths)]).cumsum(0, dtype=torch.int32)
        packed, sums = attend_packed(query, key, value, starts, prompt + max(own_lengths), scale, kind)
        assert sums.shape == (heads, len(query))
        of_prompt = cache.take(prompt)
        of_own = [cache.take(length) for length in own_lengths]
        write_cache(shared[1], shared[2], cache.addresses, 0, integers(cache.slots(of_prompt, prompt)), block)
        for number, (states, blocks) in enumerate(zip(own, of_own, strict=True)):
            length, begin = own_lengths[number], int(starts[number])
            write_cache(states[1], states[2], cache.addresses, 0, integers(cache.slots(blocks, length)), block)
            whole = packed[begin : begin + prompt + length]
            exact = reference(*sequences[number], scale, 0, kind)
            torch.testing.assert_close(whole, exact, **near)
            log_sums = reference_sums(*sequences[number][:2], scale, window)
            torch.testing.assert_close(
                sums[:, begin : begin + prompt + length].double(), log_sums, atol=1e-4, rtol=1e-4
            )
            # The own tokens, by chunks of other sizes than those of training.
            for first in range(0, length, 50):
                count = min(50, length - first)
                found = attend_to_cache(
                    states[0][first : first + count], cache.addresses, 0, kv_heads, block,
                    integers([[0, at] for at in range(0, count, TILE)]),
                    integers([[0, count, prompt + first, prompt]]),
                    integers([of_prompt]), integers([blocks]), scale, kind,
                )  # fmt: skip
                assert same(found, whole[prompt + first : prompt + first + count])
        rows = len(own_lengths)
        found = decode(
            torch.stack([states[0][-1] for states in own]), cache.addresses, 0, kv_heads, block,
            integers([0, *[rows] * rows]), integers([0] * rows), table([of_prompt], rows, len(of_prompt)),
            integers([prompt, *[0] * (rows - 1)]), table(of_own, rows, max(map(len, of_own))),
            integers(own_lengths), integers([prompt] * rows), rows, scale, kind,
        )  # fmt: skip
        assert same(found, torch.stack([packed[int(end) - 1] for end in starts[1:]]))
        cache.give(of_prompt, *of_own)


@pytest.mark.usefixtures("tanh")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocabulary", [11, 9001, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_has_the_bits_of_the_trainers_log_probs(vocabulary, dtype, softcap) -> None:
    from ebbtide.policy.logprob_kernels import reduce
    from ebbtide.rollout.paged.sample_kernels import sample_tokens

    torch.manual_seed(0)
    whole = (torch.randn(128, vocabulary, device=DEVICE) * 3).to(dtype)
    of_rows = [(1, 1.0), (3, 0.7), (2, 0.0)] + ([] if INTERPRETED else [(17, 1.3), (128, 0.7), (96, 1.0)])
    for rows, temperature in of_rows:
        logits, scale = whole[:rows].clone(), 0.5 / (temperature or 1.0)
        temperatures, scales = (torch.full((rows,), value, device=DEVICE) for value in (temperature, scale))
        last, result = torch.zeros(rows, dtype=torch.long, device=DEVICE), torch.zeros(3, rows, device=DEVICE)
        uniform, places = torch.rand(2, rows, device=DEVICE) / 2, integers(range(rows))
        sample_tokens(logits, temperatures, scales, None, uniform, places, last, result, 0.5, softcap)
        many = whole[: 2 * rows + 1]  # the trainer has them among other rows
        targets = torch.cat([last, last, last[:1]])[: len(many)]
        shaped = many.double() if softcap is None else (many.double() / softcap).tanh() * softcap
        for found, of in ((result[1], scale), (result[2], 0.5)):
            lses, logprobs, entropies = reduce(many, targets, of, softcap)
            assert torch.equal(found, logprobs[:rows])
            wanted = (shaped * of).log_softmax(-1)
            assert (logprobs.double() - wanted.gather(1, targets[:, None])[:, 0]).abs().max() < 3e-6
            assert (entropies.double() + (wanted.exp() * wanted).sum(-1)).abs().max() < 3e-6
            assert (lses.double() - (shaped * of).logsumexp(-1)).abs().max() < 3e-6


def test_log_probs_with_tokens_left_out_are_over_all_of_them() -> None:
    from ebbtide.policy.logprob_kernels import reduce
    from ebbtide.rollout.paged.sample_kernels import sample_tokens

    torch.manual_seed(0)
    logits, scales = torch.randn(7, 9001, device=DEVICE), torch.full((7,), 0.7, device=DEVICE)
    least = logits.topk(2).values[:, 1].contiguous()
    last, result = torch.zeros(7, dtype=torch.long, device=DEVICE), torch.zeros(3, 7, device=DEVICE)
    uniform = torch.rand(2, 7, device=DEVICE) / 2
    sample_tokens(logits, 1 / scales, scales, least, uniform, integers(range(7)), last, result, 1.0, None)
    assert (logits.gather(1, last[:, None])[:, 0] >= least).all()
    assert torch.equal(result[1], reduce(logits, last, 0.7, None)[1])


def test_log_probs_of_logits_without_numbers_or_a_chance_are_none() -> None:
    """A chunk that is all -inf changes nothing; not a number stays visible."""
    from ebbtide.policy.logprob_kernels import reduce

    torch.manual_seed(0)
    logits, targets = torch.randn(3, 9001, device=DEVICE), torch.tensor([5, 5, 5], device=DEVICE)
    logits[0, 4096:], logits[1, 7000] = -torch.inf, torch.nan
    lse, logprobs, _ = reduce(logits, targets, 1.0, None)
    torch.testing.assert_close(lse[0], logits[0, :4096].logsumexp(0))
    assert logprobs.isfinite().tolist() == [True, False, True]
