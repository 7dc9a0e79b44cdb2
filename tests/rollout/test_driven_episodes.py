"""Episodes that an environment drives: its process asks for turns by token ids, by a call or over HTTP."""

import json

import pytest

from ebbtide.algorithms.episodes import PlayedEpisodes
from ebbtide.algorithms.loop import train
from ebbtide.progress import no_progress
from ebbtide.report.report import Report
from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.task import Problem
from ebbtide.worker import Worker


def config_of(tiny, name: str, max_turns: int = 3, **more):
    environment = {"object": f"driven_environments:{name}", "max_turns": max_turns}
    sizes = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 12, "model.scratch.context": 64}
    task = {"task": {"environment": environment, "size": 8, "held_out": 0}, "evaluate": None}
    return tiny({**task, **sizes, **more})


@pytest.fixture
def played(tiny, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])

    def play(name: str, max_turns: int = 3):
        with (
            Worker(config_of(tiny, name, max_turns)) as worker,
            worker.phase("generate"),
            PlayedEpisodes(worker) as episodes,
        ):
            prompts = [Prompt(Problem([], metadata={"seed": 5}), "", [])]
            return episodes.play(prompts, [[1, 2, 3]], SamplingParams(12), no_progress)

    return play


def test_turns_by_call_and_over_http(played) -> None:
    for episode in played("TwoTurns"):
        (branch,) = episode.branches
        first, second = (turn.completion for turn in episode.turns)
        assert branch.tokens == [3, 4, 5, *first.tokens, 6, *second.tokens]
        assert [branch.tokens[place] for place in branch.sampled] == [*first.tokens, *second.tokens]
        assert branch.logprobs == [*first.logprobs, *second.logprobs]
        sampled = [*first.tokens, *second.tokens]
        assert episode.scored is not None
        assert episode.scored.value == pytest.approx(sampled.count(5) / len(sampled))
        assert episode.scored.parts["length"] == len(sampled)
        assert len(first.tokens) <= 4
        assert len(second.tokens) <= 3


def test_chat_completions_keep_the_tokens_that_were_sampled(played) -> None:
    for episode in played("Chats"):
        (branch,) = episode.branches
        first, second = (turn.completion for turn in episode.turns)
        prompt = len(branch.tokens) - len(second.tokens) - 1 - len(first.tokens)
        assert branch.tokens[prompt : prompt + len(first.tokens)] == first.tokens
        assert branch.sampled[: len(first.tokens)] == list(range(prompt, prompt + len(first.tokens)))


def test_a_conversation_goes_on_whole_after_a_refusal(played) -> None:
    for episode in played("Insists"):
        assert episode.scored.failure is None
        first, second = episode.branches
        assert len(second.sampled) <= 2
        assert second.tokens[:2] == first.tokens[:2]  # the question, and not only what was said last
        assert len(second.tokens) < 20


def test_an_edited_conversation_begins_another_branch(played) -> None:
    for episode in played("Edits"):
        assert len(episode.branches) == 2
        assert all(len(branch.sampled) <= 2 for branch in episode.branches)


def test_other_tokens_begin_another_branch(played) -> None:
    for episode in played("Forks"):
        assert [branch.tokens[: -len(branch.sampled)] for branch in episode.branches] == [[3, 4], [7, 7, 7]]
        assert all(turn.answer_tokens >= 0 for turn in episode.turns)


def test_a_limit_is_told_to_the_environment(played) -> None:
    for episode in played("Greedy"):
        assert (episode.finish, len(episode.turns)) == ("length", 3)
        assert episode.scored.value == 3.0
        assert episode.scored.parts["told"] == 1.0


def test_all_that_is_sampled_has_one_limit(played) -> None:
    for episode in played("Unrelated", max_turns=50):
        assert episode.finish == "length"
        assert episode.scored.value == sum(len(branch.sampled) for branch in episode.branches) <= 12


def test_an_episode_without_a_turn_and_a_refusing_endpoint(played) -> None:
    assert [episode.scored.value for episode in played("Silent")] == [0.5] * 3
    assert [episode.scored.value for episode in played("Wrong")] == [9.0] * 3


def test_what_it_raises_costs_the_episode(played) -> None:
    for episode in played("Raises"):
        assert episode.scored.failure == "error"
        assert "no episode today" in episode.scored.message
        assert len(episode.turns) == 2


def test_a_run_trains_on_them(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    config = config_of(tiny, "TwoTurns", **{"train.steps": 2, "run.folder": str(tmp_path / "run"), "checkpoint": None})
    with Report(config, "test") as report:
        train(config, report)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["turns"] for line in lines] == [2.0, 2.0]
    assert all(line["mismatch_max"] < 1e-4 for line in lines)


def test_an_endpoint_ends_with_its_episode(tiny, monkeypatch) -> None:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    with (
        Worker(config_of(tiny, "Threads")) as worker,
        worker.phase("generate"),
        PlayedEpisodes(worker) as episodes,
    ):
        prompts = [Prompt(Problem([], metadata={"seed": 5}), "", [])]
        counts = [episodes.play(prompts, [[1]], SamplingParams(12), no_progress)[0].scored.value for _ in range(4)]
    assert counts == [counts[0]] * 4
