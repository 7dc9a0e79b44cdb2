"""The schedule of sequences that wait for environments: no block is lost or shared by mistake, whatever runs out;
nothing stands still while a sequence could run; and nothing is prefilled twice unless its blocks were given up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.rollout.paged.cache_costs import CacheSize
from ebbtide.rollout.paged.scheduler import PrefillChunk, PromptGroup, ScheduledSample, Scheduler
from simulated_states import SimulatedStates

SIZE, TURNS, TURN, SAID = 3, 3, 4, 5
LONGEST = TURNS * (TURN + SAID)


def check(schedule: Scheduler, groups: list[PromptGroup]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    held = [block for one in (*groups, *samples) for block in one.block_table.blocks]
    assert len(set(held)) == len(held)
    assert schedule.allocator.num_free + len(held) == schedule.allocator.num_blocks
    rows = [sample.row for sample in samples if sample.is_running]
    assert len(set(rows)) == len(rows) == schedule.num_running
    for group in groups:
        assert bool(group.block_table.blocks) == any(sample.has_blocks for sample in group.samples)
        assert group.block_table.computed <= SIZE * len(group.block_table.blocks)
    for sample in samples:
        assert sample.block_table.computed <= SIZE * len(sample.block_table.blocks)
        assert not (sample.done and sample.has_blocks)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 7),
    st.booleans(),
    st.none() | st.integers(2, 12),
    st.randoms(use_true_random=False),
)
def test_every_sequence_ends_and_no_block_is_lost(prompts, spare, batch, chunk, ahead, slots, chance) -> None:
    count = -(-max(length for length, _ in prompts) // SIZE) + -(-LONGEST // SIZE) + spare
    schedule = Scheduler(CacheSize(count, slots), SIZE, batch=batch, chunk=chunk)
    states = SimulatedStates(slots)
    groups = [schedule.add(range(length), [TURN] * samples)[0].group for length, samples in prompts]
    everyone = [sample for group in groups for sample in group.samples]
    turns = dict.fromkeys(everyone, 0)
    ends = {sample: chance.randint(1, TURN) for sample in everyone}  # tokens at which its turn is over
    parked: list[ScheduledSample] = []
    overrun: set[ScheduledSample] = set()
    in_flight: list[ScheduledSample] = []
    prefilled = expected = 0
    for _ in range(20_000):
        if all(sample.done for sample in everyone):
            break
        work = schedule.schedule()
        check(schedule, groups)
        assert work or in_flight or parked  # else everything would stand still
        states.run(work)
        asked: list[ScheduledSample] = []
        for item in work:
            if isinstance(item, PrefillChunk):
                prefilled += item.last - item.first
                asked += schedule.schedule_first_tokens(item)
            else:
                asked.append(item)
        now, in_flight = (in_flight, asked) if ahead and asked else ([*in_flight, *asked], [])
        for sample in now:
            if sample.done or sample in overrun:
                overrun.discard(sample)
                continue
            schedule.append_token(sample, 0, done=False)
            if len(sample.tokens) == ends[sample]:
                if sample.num_scheduled > len(sample.tokens):
                    overrun.add(sample)
                schedule.park(sample)
                parked.append(sample)
        check(schedule, groups)
        for sample in [one for one in parked if chance.random() < 0.3]:
            parked.remove(sample)
            turns[sample] += 1
            if turns[sample] == TURNS:
                schedule.cancel(sample)
                continue
            said = [1] * chance.randint(0, SAID)
            expected += len(said) + 1  # and the token that ended the turn
            start = len(sample.tokens) + len(said)
            schedule.unpark(sample, said, start + TURN)
            ends[sample] = start + chance.randint(1, TURN)
    assert all(sample.done for sample in everyone)
    assert schedule.used_size == CacheSize(0, None if slots is None else 0)
    assert not schedule.groups
    if not schedule.recomputed and not schedule.preempted:
        assert prefilled <= sum(length for length, _ in prompts) + expected
