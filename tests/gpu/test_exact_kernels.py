"""The kernels of exact mode: a token's bits do not depend on what is computed with it."""

import pytest
import torch
from test_paged_kernels import DEVICE, DTYPES, INTERPRETED, NEAR, Paged, integers, reference, table

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


@pytest.mark.parametrize("softcap", [None] if INTERPRETED else [None, 3.0])  # it has no tanh
def test_logprobs_have_the_same_bits_with_a_scale_for_each_row(softcap) -> None:
    from ebbtide.policy.logprob_kernels import reduce

    torch.manual_seed(0)
    logits = torch.randn(7, 9001, device=DEVICE).to(DTYPES[-1])
    targets = torch.randint(9001, (7,), device=DEVICE)
    for temperature in (1.0, 0.7, 1.3):
        wanted = reduce(logits, targets, 0.5 / temperature, softcap)
        found = reduce(logits[2:5], targets[2:5], torch.full((3,), 0.5 / temperature, device=DEVICE), softcap)
        assert all(torch.equal(ours, theirs[2:5]) for ours, theirs in zip(found, wanted, strict=True))
