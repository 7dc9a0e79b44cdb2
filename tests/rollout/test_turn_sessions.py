"""Sequences of several turns: what is sampled in a turn is what a completion of everything before it would be, whether
keys and values are kept, given up or in flight; and nothing is prefilled twice while there is room."""

import random

import pytest

from ebbtide.model.load import load_model
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.turn_sessions import open_turns

PROMPTS, GROUP, TURNS, TURN_TOKENS = 5, 3, 4, 6


@pytest.fixture(scope="module")
def loaded():
    import torch

    from conftest import TINY, merged
    from ebbtide.config.algorithms.grpo import GrpoConfig

    torch.manual_seed(3)
    return load_model(GrpoConfig.model_validate(merged(TINY, {})), torch.device("cpu"))


def play(engine, *, late: int = 0):
    """Plays all sequences, with answers of random lengths; `late`: answers come after so many further steps. Returns
    (each turn's prompt, seed, most tokens and completion; the figures)."""
    chance = random.Random(7)
    answers = {
        (prompt, sample, turn): [chance.randrange(2, 12) for _ in range(chance.randrange(0, 9))]
        for prompt in range(PROMPTS)
        for sample in range(GROUP)
        for turn in range(TURNS)
    }
    sampling = SamplingParams(TURN_TOKENS)
    played, waiting, where, steps = [], [], {}, 0
    with open_turns(
        engine, sampling, sequences=PROMPTS * GROUP, samples=GROUP, prompt=8, new=TURNS * (TURN_TOKENS + 8)
    ) as session:
        for prompt in range(PROMPTS):
            tokens = [2 + prompt, 5, 3 + prompt, 7, 4][: 2 + prompt % 4]
            seeds = [100 * prompt + sample for sample in range(GROUP)]
            for sample, sequence in enumerate(session.begin(tokens, seeds, TURN_TOKENS)):
                where[sequence] = [prompt, sample, 0, list(tokens), seeds[sample]]
        while where:
            steps += 1
            for sequence, completion in session.step():
                prompt, sample, turn, before, seed = where[sequence]
                played.append(((prompt, sample, turn), before, seed, completion))
                waiting.append((steps + late * (1 + sample), sequence, completion))
            for due in [one for one in waiting if one[0] <= steps or session.finished]:
                waiting.remove(due)
                _, sequence, completion = due
                place = where[sequence]
                if place[2] == TURNS - 1:
                    session.end(sequence)
                    del where[sequence]
                    continue
                answer = answers[tuple(place[:3])]
                place[2] += 1
                place[3] = [*place[3], *completion.tokens, *answer]
                place[4] += 1000
                session.append(sequence, answer, place[4], TURN_TOKENS)
        figures = session.figures
    return sorted(played, key=lambda one: one[0]), figures


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [None, 26, 16])
@pytest.mark.parametrize("late", [0, 3])
def test_a_turn_is_a_completion_of_all_before_it(loaded, ahead, blocks, late) -> None:
    played, figures = play(PagedEngine(loaded, 4, block=4, blocks=blocks, chunk=7, ahead=ahead), late=late)
    assert len(played) == PROMPTS * GROUP * TURNS
    fresh = PagedEngine(loaded, 64, block=4).generate(
        [Request(before, [seed]) for _, before, seed, _ in played], SamplingParams(TURN_TOKENS), lambda done, of: None
    )
    for (_, _, _, completion), (alone,) in zip(played, fresh, strict=True):
        assert (completion.tokens, completion.finish, completion.text) == (alone.tokens, alone.finish, alone.text)
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert {completion.finish for *_, completion in played} == {"stop", "length"}
    # Keys and values are given up only where blocks run out.
    assert bool(figures["tokens_recomputed"]) == (blocks is not None)


def test_an_engine_without_sessions_samples_the_same(loaded) -> None:
    paged, _ = play(PagedEngine(loaded, 4, block=4))
    plain, figures = play(HuggingFaceEngine(loaded, 4))
    assert [(one[0], one[1], one[3].tokens) for one in paged] == [(one[0], one[1], one[3].tokens) for one in plain]
    assert figures["tokens_recomputed"] > 0


def test_a_stop_text_does_not_reach_across_turns(loaded) -> None:
    """A stop text that began in what was appended does not end the next turn at its first token."""
    engine = PagedEngine(loaded, 4, block=4)
    with open_turns(
        engine, SamplingParams(3, stop=("11",), ignore_eos=True), sequences=1, samples=1, prompt=8, new=40
    ) as session:
        (sequence,) = session.begin([3, 4], [5], 3)
        ended = []
        for seed in range(40):
            while not session.finished:
                ended += session.step()
            session.append(sequence, [engine.tokenizer.convert_tokens_to_ids("1")], seed, 1) if seed < 20 else None
    firsts = [completion for _, completion in ended if completion.text.startswith("1")]
    assert firsts
    assert all(completion.finish == "length" for completion in firsts)
