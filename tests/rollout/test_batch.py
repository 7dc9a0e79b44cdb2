"""From samples to data: what is dropped, what is masked, how minibatches are cut; and pass@k."""

import itertools
from math import isnan

import pytest

from ebbtide.algorithms.evaluate import evaluate, pass_at_k
from ebbtide.rollout.batch import assemble, average_metrics, make_requests, minibatches
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.task import Problem, ask

PROMPTS = [Prompt(Problem(ask(str(i))), str(i), [i]) for i in range(2)]


def batch(config, rewards, finishes=None):
    groups = [[Completion([1, 2], [0.0, 0.0], [0.0, 0.0], "stop", "") for _ in group] for group in rewards]
    if finishes:
        groups = [[Completion([1, 2], [0.0, 0.0], [0.0, 0.0], finish, "") for finish in row] for row in finishes]
    return assemble(
        config, PROMPTS, groups, [ScoreResult(reward, {"part": reward}) for group in rewards for reward in group]
    )


def weights(data) -> list[float]:
    return [datum.values["weights"] for datum in data]


def test_flat_groups_are_dropped_and_counted(tiny) -> None:
    config = tiny({"rollout.group_size": 2})
    made = batch(config, [[0.3, 0.3], [1.0, 0.0]])
    assert made.zero_std_groups == 1
    assert [datum.tokens[: datum.targets[0]] for datum in made.data] == [[1], [1]]
    assert made.data[0].values["advantages"] == -made.data[1].values["advantages"] > 0
    assert len(made.samples) == 4
    kept = batch(tiny({"rollout.group_size": 2, "advantage.drop_zero_std_groups": False}), [[0.3, 0.3], [1.0, 0.0]])
    assert len(kept.data) == 4


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_dropping_flat_groups_changes_no_weight(tiny, normalise) -> None:
    """Leaving out what has no gradient must not lengthen the step of what has."""
    changes = {"rollout.group_size": 2, "loss.normalise": normalise}
    rewards = [[0.3, 0.3], [1.0, 0.0]]
    dropped = batch(tiny(changes), rewards).data
    kept = batch(tiny({**changes, "advantage.drop_zero_std_groups": False}), rewards).data
    assert [trajectory.values["weights"] for trajectory in dropped] == [
        trajectory.values["weights"] for trajectory in kept[2:]
    ]
    assert sum(t.values["weights"] * len(t.targets) for t in kept) == pytest.approx(
        2 / 6 if normalise == "constant" else 1
    )
    halves = batch(tiny({**changes, "train.minibatches": 2}), rewards).data
    assert weights(halves) == [2 * weight for weight in weights(dropped)]


def test_all_flat_leaves_nothing(tiny) -> None:
    made = batch(tiny({"rollout.group_size": 2}), [[0.3, 0.3], [0.1, 0.1]])
    assert made.data == []
    assert list(minibatches(tiny(), [], 1)) == []
    assert average_metrics([]) == {}


def test_an_update_that_was_skipped_leaves_the_figures_of_the_others() -> None:
    nan, inf = float("nan"), float("inf")
    done = {"loss": 0.5, "grad_norm": 2.0, "mismatch_max": 0.1, "lr": 1e-3, "updates_skipped": 0.0}
    skipped = {"loss": 0.3, "grad_norm": nan, "mismatch_max": nan, "lr": 1e-4, "updates_skipped": 1.0}
    wanted = {"loss": 0.5, "grad_norm": 2.0, "mismatch_max": 0.1, "lr": 1e-4, "updates_skipped": 1.0, "updates": 2}
    assert average_metrics([done, skipped]) == pytest.approx(wanted)
    assert isnan(average_metrics([done, {**done, "loss": nan}])["loss"])  # of one that was taken it is shown
    wanted = {"loss": 0.3, "lr": 1e-4, "updates_skipped": 2.0, "updates": 2}
    assert average_metrics([skipped, {**skipped, "grad_norm": inf}]) == pytest.approx(wanted)


def test_overlong_samples_are_masked_but_count_in_the_baseline(tiny) -> None:
    finishes = [["stop", "length"], ["length", "stop"]]
    masked = batch(tiny({"rollout.group_size": 2, "loss.mask_overlong": True}), [[1.0, 0.0], [1.0, 0.0]], finishes)
    unmasked = batch(tiny({"rollout.group_size": 2}), [[1.0, 0.0], [1.0, 0.0]], finishes)
    assert [t.values["advantages"] for t in masked.data] == [
        unmasked.data[0].values["advantages"],
        unmasked.data[3].values["advantages"],
    ]


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_all_overlong_and_masked_leaves_nothing(tiny, normalise) -> None:
    config = tiny({"rollout.group_size": 2, "loss.mask_overlong": True, "loss.normalise": normalise})
    made = batch(config, [[1.0, 0.0], [1.0, 0.0]], [["length"] * 2] * 2)
    assert made.data == []
    assert made.metrics(1.0)["samples_trained"] == 0


def test_figures(tiny) -> None:
    made = batch(tiny({"rollout.group_size": 2}), [[1.0, 0.0], [0.5, 0.5]])
    figures = made.metrics(1.0)
    assert figures["reward"] == figures["reward/part"] == 0.5
    assert figures["samples"] == 4
    assert figures["samples_trained"] == 2
    assert figures["finished"] == 1.0
    assert figures["groups_with_signal"] == 0.5
    assert [sample.trained for sample in made.samples] == [True, True, False, False]


def test_lengths_by_outcome(tiny) -> None:
    made = batch(tiny({"rollout.group_size": 2}), [[1.0, 0.0], [0.5, 0.5]])
    passed, *failed = [len(sample.completion.tokens) for sample in made.samples]
    figures = made.metrics(1.0)
    assert figures["completion_tokens/passed"] == passed
    assert figures["completion_tokens/failed"] == pytest.approx(sum(failed) / 3)
    assert figures["completion_tokens_max"] == max(passed, *failed)
    assert "completion_tokens/failed" not in made.metrics(0.0)


def test_minibatches_cover_each_epoch_once(tiny) -> None:
    config = tiny({"train.minibatches": 3, "train.epochs": 2})
    items = [f"t{i}" for i in range(10)]
    parts = list(minibatches(config, items, 1))
    assert [len(part) for part in parts] == [4, 3, 3] * 2
    assert sorted(itertools.chain(*parts[:3])) == sorted(itertools.chain(*parts[3:])) == sorted(items)
    assert parts[:3] != parts[3:]
    assert parts == list(minibatches(config, items, 1))
    assert parts != list(minibatches(config, items, 2))


def test_seeds_differ_everywhere() -> None:
    made = [seed for step in (1, 2) for request in make_requests(PROMPTS, 3, 0, step) for seed in request.seeds]
    assert len(set(made)) == 12
    assert all(0 <= seed < 2**63 for seed in made)


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 1), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_draws_that_pass(samples, passed, k) -> None:
    draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_what_could_not_be_scored_has_not_passed(tiny) -> None:
    """Whatever reward passes: a failure's 0 is none that a scorer gave."""
    config = tiny(
        {"evaluate": {"every": 1, "problems": 1, "samples": 4, "temperature": 1.0, "k": [1], "pass_reward": -0.5}}
    )
    scored = [
        ScoreResult(-1.0),
        ScoreResult(0.0),
        ScoreResult(0.0, failure="timeout"),
        ScoreResult(0.0, failure="error"),
    ]
    done = Completion([1], [0.0], [0.0], "length", "text")
    figures = evaluate(config, lambda *_: ([done] * 4, scored), PROMPTS[:1], lambda *_: None)
    assert figures["evaluate/pass@1"] == 0.25


def test_the_final_evaluation_is_greedy_and_sampled_over_more_problems(tiny) -> None:
    final = {"problems": 2, "samples": 4, "k": [1, 4]}
    config = tiny({"evaluate": {"every": 1, "problems": 1, "final": final}})
    asked: list[tuple[int, int, float]] = []

    def attempt(prompts, samples, sampling, progress):
        asked.append((len(prompts), samples, sampling.temperature))
        right = [sampling.temperature == 0 or number == 0 for _ in prompts for number in range(samples)]
        return [Completion([1, 2], [0.0] * 2, [0.0] * 2, "stop", "") for _ in right], [
            ScoreResult(float(one)) for one in right
        ]

    usual = evaluate(config, attempt, PROMPTS[:2], lambda *_: None)
    assert asked == [(1, 1, 0.0)]
    assert not any("final" in name for name in usual)
    last = evaluate(config, attempt, PROMPTS[:2], lambda *_: None, last=True)
    assert asked[1:] == [(1, 1, 0.0), (2, 1, 0.0), (2, 4, 1.0)]
    assert last["evaluate/final/greedy"] == last["evaluate/final/pass@4"] == last["evaluate/finished"] == 1.0
    assert last["evaluate/final/pass@1"] == 0.25
    assert last["evaluate/completion_tokens"] == 2
