"""The paged engine's schedule: blocks are never lost or shared by mistake, whatever runs out; and samples give way without changing."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.policy.model import load_model
from ebbtide.rollout.engine import Request, Sampling
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.schedule import Blocks, Chunk, Group, Sample, Schedule

SIZE = 3


def needed(tokens: int) -> int:
    return -(-tokens // SIZE)


def check(schedule: Schedule) -> None:
    """Every block is free, or belongs to one prompt or one sample."""
    held = [block for group in schedule.groups for block in group.read.blocks]
    held += [block for sample in schedule.samples for block in sample.own.blocks]
    assert len(set(held)) == len(held)
    assert schedule.blocks.free + len(held) == schedule.blocks.count
    for group in schedule.groups:
        assert group.read.computed <= SIZE * len(group.read.blocks)
        assert bool(group.read.blocks) == any(sample.runs for sample in group.samples)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_every_sample_ends_and_no_block_is_lost(prompts, spare, batch, chunk, chance) -> None:
    most = 8
    count = needed(max(length for length, _ in prompts)) + needed(most) + spare
    schedule = Schedule([(range(length), samples) for length, samples in prompts], Blocks(count), SIZE, batch=batch, chunk=chunk)
    lengths = {sample: chance.randint(1, most) for sample in schedule.samples}
    cancelled = {sample for sample in schedule.samples if chance.random() < 0.1}
    for _ in range(5000):
        if schedule.finished:
            break
        work = schedule.next()
        check(schedule)
        assert work
        assert schedule.running <= batch
        assert sum(item.last - item.first for item in work if isinstance(item, Chunk)) <= chunk
        wanting = []
        for item in work:
            if isinstance(item, Sample):
                assert item.group.is_read
                assert item.own.computed == len(item.tokens) - 1
                assert len(item.own.slots(0, len(item.tokens), SIZE)) == len(item.tokens)  # its last token has a place
                wanting.append(item)
            elif schedule.advance(item):
                assert isinstance(item.of, Group)
                wanting += [sample for sample in item.of.samples if not sample.tokens and not sample.done]
        for sample in wanting:
            schedule.sampled(sample, len(sample.tokens), 0.0, done=len(sample.tokens) + 1 == lengths[sample])
        for sample in sorted(cancelled, key=lambda sample: sample.number):
            if not sample.done and chance.random() < 0.2:
                schedule.cancel(sample)
        check(schedule)
    assert schedule.finished
    assert schedule.blocks.free == count
    for sample in schedule.samples:
        assert sample.done
        assert sample.tokens == list(range(lengths[sample])) or sample in cancelled


def test_samples_that_give_way_end_the_same(tiny) -> None:
    loaded = load_model(tiny())
    sampling = Sampling(20, temperature=1.0)
    asked = [Request([3, 4, 5, 6, 7], [1, 2, 3, 4]), Request([8, 9], [5, 6, 7])]
    wanted = HuggingFaceEngine(loaded, 100).generate(asked, sampling, lambda *_: None)
    tight = PagedEngine(loaded, 100, block=2, chunk=4, blocks=24)
    found = tight.generate(asked, sampling, lambda *_: None)
    assert tight.preempted > 0
    assert [[one.tokens for one in group] for group in found] == [[one.tokens for one in group] for group in wanted]
    for mine, theirs in zip(chain(*found), chain(*wanted), strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=1e-5)


def test_a_thousand_requests(tiny) -> None:
    loaded = load_model(tiny())
    engine = PagedEngine(loaded, batch=64, block=4, blocks=150)
    found = engine.generate([Request([3 + i % 7] * (1 + i % 5), [i]) for i in range(1000)], Sampling(2), lambda *_: None)
    assert all(len(group) == 1 and 1 <= len(group[0].tokens) <= 2 for group in found)


def test_a_cache_that_cannot_hold_one_sample_is_an_error(tiny) -> None:
    loaded = load_model(tiny())
    with pytest.raises(UserError, match=r"room for 8 tokens.*may need 12.*`rollout.max_new_tokens`"):
        PagedEngine(loaded, 4, block=4, blocks=2).generate([Request([3, 4, 5], [1])], Sampling(8), lambda *_: None)
