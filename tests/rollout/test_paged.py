"""The paged engine's schedule: blocks are never lost or shared by mistake, whatever runs out; and samples give way
without changing."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.cache_costs import CacheSize, decode_passes
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.scheduler import PrefillChunk, PromptGroup, ScheduledSample, Scheduler
from simulated_states import SimulatedStates

SIZE = 3


def needed(tokens: int) -> int:
    return -(-tokens // SIZE)


def check(schedule: Scheduler, groups: list[PromptGroup]) -> None:
    """Every block is free, or belongs to one prompt or one sample; and so does every row."""
    samples = [sample for group in groups for sample in group.samples]
    held = [block for group in groups for block in group.block_table.blocks] + [
        block for sample in samples for block in sample.block_table.blocks
    ]
    assert len(set(held)) == len(held)
    assert schedule.allocator.num_free + len(held) == schedule.allocator.num_blocks
    rows = [sample.row for sample in samples if sample.is_running]
    assert len(set(rows)) == len(rows) == schedule.num_running
    for group in groups:
        assert group.block_table.computed <= SIZE * len(group.block_table.blocks)
        assert bool(group.block_table.blocks) == any(sample.is_running for sample in group.samples)
    assert set(schedule.groups.values()) == {
        group for group in groups if not all(sample.done for sample in group.samples)
    }


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(1, 7),
    st.booleans(),
    st.none() | st.integers(2, 9),
    st.randoms(use_true_random=False),
)
def test_every_sample_ends_and_no_block_is_lost(prompts, spare, batch, chunk, ahead, slots, chance) -> None:
    """Prompts come in over time, are cancelled at any moment, and tokens are known at once or a step later."""
    most = 8
    count = needed(max(length for length, *_ in prompts)) + needed(most) + spare
    schedule = Scheduler(CacheSize(count, slots), SIZE, batch=batch, chunk=chunk)
    states = SimulatedStates(slots)
    groups: list[PromptGroup] = []
    lengths: dict[ScheduledSample, int] = {}
    cancelled: set[ScheduledSample] = set()
    under_way: list[ScheduledSample] = []
    ran_when_asked: dict[ScheduledSample, int] = {}
    for number in range(5000):
        for length, samples, when in prompts:
            if when == number:
                added = schedule.add(range(length), [chance.randint(1, most) for _ in range(samples)])
                groups.append(added[0].group)
                lengths |= {sample: chance.randint(1, sample.max_tokens) for sample in added}
                cancelled |= {sample for sample in added if chance.random() < 0.1}
        if number > 5 and schedule.finished:
            break
        work = schedule.schedule()
        check(schedule, groups)
        assert work or under_way or schedule.finished
        assert schedule.num_running <= batch
        assert sum(item.last - item.first for item in work if isinstance(item, PrefillChunk)) <= chunk
        states.run(work)
        asked: list[ScheduledSample] = []
        for item in work:
            if isinstance(item, ScheduledSample):
                assert item.group.is_prefilled
                assert item.block_table.computed == item.num_scheduled - 1
                assert (
                    len(item.tokens) == item.block_table.computed or ran_when_asked[item] == item.admission
                )  # its last token is known, or in its row
                # its last token has a place
                assert len(item.block_table.slots(0, item.block_table.computed, SIZE)) == item.block_table.computed
                asked.append(item)
            else:
                assert len(item.tokens) == item.last - item.first  # all of them are known
                asked += schedule.schedule_first_tokens(item)
        ran_when_asked |= {sample: sample.admission if sample.is_running else -1 for sample in asked}
        known, under_way = (under_way, asked) if ahead else (asked, [])
        for sample in known:
            if not sample.done:
                schedule.append_token(sample, len(sample.tokens), done=len(sample.tokens) + 1 == lengths[sample])
        for sample in sorted(cancelled, key=lambda sample: sample.number):
            if chance.random() < 0.2:
                schedule.cancel(sample)
        if not under_way and chance.random() < 0.1:  # the phase ends: the cache goes, or what is used of it moves
            if chance.random() < 0.5:
                schedule.preempt_all()
            used = schedule.move_to(CacheSize(count, slots))
            assert len(set(used.blocks)) == len(used.blocks) == schedule.used_size.blocks
            assert len(set(used.states)) == len(used.states) == (schedule.used_size.states or 0)
            states.move(used.states)
        check(schedule, groups)
    assert schedule.finished
    assert schedule.used_size == CacheSize(0, None if slots is None else 0)
    for sample, length in lengths.items():
        assert sample.done
        assert sample.tokens == list(range(length)) or sample in cancelled


def test_samples_that_give_way_end_the_same(tiny) -> None:
    loaded = load_model(tiny())
    sampling = SamplingParams(20, temperature=1.0)
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
    found = engine.generate(
        [Request([3 + i % 7] * (1 + i % 5), [i]) for i in range(1000)], SamplingParams(2), lambda *_: None
    )
    assert all(len(group) == 1 and 1 <= len(group[0].tokens) <= 2 for group in found)


def test_a_cache_that_cannot_hold_one_sample_is_an_error(tiny) -> None:
    loaded = load_model(tiny())
    with pytest.raises(
        UserError, match=r"room for 8 tokens.*may need 12.*`rollout.max_new_tokens`.*`batch` of `ebbtide serve`: now 4"
    ):
        PagedEngine(loaded, 4, block=4, blocks=2).generate(
            [Request([3, 4, 5], [1])], SamplingParams(8), lambda *_: None
        )


@pytest.mark.parametrize("new", [100, 256, 1000])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 1.0])
def test_planned_passes_are_about_those_of_the_scheduler(new, share) -> None:
    """All of the same length, as a plan has them."""
    prompts, samples, block = 6, 4, 16
    blocks = prompts + max(-(-new // block) + 1, int(share * prompts * samples * (-(-new // block) + 1)))
    schedule = Scheduler(CacheSize(blocks), block, batch=prompts * samples, chunk=10_000)
    for _ in range(prompts):
        schedule.add(range(block), [new] * samples)
    passes = 0
    while not schedule.finished:
        work = schedule.schedule()
        asked = [
            one for chunk in work if isinstance(chunk, PrefillChunk) for one in schedule.schedule_first_tokens(chunk)
        ]
        decoded = [one for one in work if not isinstance(one, PrefillChunk)]
        passes += bool(decoded)
        for one in (*asked, *decoded):
            schedule.append_token(one, 0, done=len(one.tokens) + 1 == new)
    found, recomputed = decode_passes(blocks - prompts, prompts * samples, new, block)
    assert abs(found - passes) <= 0.25 * passes
    assert abs(recomputed - schedule.recomputed) <= 0.3 * schedule.recomputed
