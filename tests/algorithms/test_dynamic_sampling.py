"""Dynamic sampling: which groups a step has in the end; and a run with it, with rewards that are shaped, and with KL
in them, which goes on as if it had never stopped."""

import shutil

import pytest
import torch

from ebbtide.algorithms.dynamic_sampling import fill_with_signal
from ebbtide.algorithms.loop import train
from ebbtide.algorithms.task import Rollouts
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.report.report import Report
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.prompts import Prompt
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.task import Problem, ask
from test_loop import SHAPED, run


def rollouts(rewards: list[list[float]], first: int = 0) -> Rollouts:
    prompts = [Prompt(Problem(ask(str(n))), str(n), [n]) for n in range(first, first + len(rewards))]
    done = Completion([1], [0.0], [0.0], "stop", "")
    scored = [ScoreResult(reward) for group in rewards for reward in group]
    return Rollouts(prompts, [[done] * len(group) for group in rewards], scored)


class Source:
    """Gives groups of these rewards, one after the other, and notes what was asked of it."""

    def __init__(self, *rewards: list[float]) -> None:
        self.left, self.asked, self.given = list(rewards), [], 10

    def __call__(self, count: int, *names: object) -> Rollouts:
        self.asked.append((count, *names))
        found, self.left = self.left[:count], self.left[count:]
        self.given += count
        return rollouts(found, self.given - count)


SAME, OTHER = [1.0, 1.0], [0.0, 1.0]


def texts(found: Rollouts) -> list[str]:
    return [prompt.text for prompt in found.prompts]


def test_groups_without_signal_are_replaced_until_none_is_left() -> None:
    source = Source(SAME, OTHER, SAME, OTHER)
    found, metrics = fill_with_signal(rollouts([OTHER, SAME, SAME]), source, 5, 10)
    assert source.asked == [(2, 5, "refill", 1), (1, 5, "refill", 2), (1, 5, "refill", 3)]
    assert texts(found) == ["0", "11", "13"]
    assert [one.value for one in found.scored] == [0.0, 1.0] * 3
    assert metrics == {"gen_batches": 4.0, "groups_sampled": 7.0, "reward_sampled": pytest.approx(11 / 14)}


def test_a_limit_of_tries_leaves_groups_without_signal() -> None:
    source = Source(SAME, SAME, SAME, SAME, OTHER)
    found, metrics = fill_with_signal(rollouts([SAME, OTHER, SAME]), source, 1, 3)
    assert texts(found) == ["1", "12", "13"]  # the last ones
    assert metrics["gen_batches"] == 3


def test_a_step_full_of_signal_stays_as_it_is() -> None:
    first = rollouts([OTHER, OTHER])
    source = Source()
    found, metrics = fill_with_signal(first, source, 1, 3)
    assert (texts(found), found.scored, source.asked) == (["0", "1"], first.scored, [])
    assert metrics["gen_batches"] == 1


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_never_stopped(tiny, tmp_path) -> None:
    changes = {**SHAPED, "train.steps": 4, "checkpoint": {"every": 2, "keep": 2, "async_save": False}}
    straight = run(tiny, tmp_path / "straight", changes)
    assert max(line["gen_batches"] for line in straight[0]) > 1
    assert all(line["kl"] != 0 and line["overlong_penalty"] > 0 for line in straight[0])
    assert any(line["groups_with_signal"] == 1 for line in straight[0])
    run(tiny, tmp_path / "stopped", changes)
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-000004")

    config = tiny({**changes, "run.folder": str(tmp_path / "stopped"), "resume": "auto"})
    resumed = find_checkpoint(config, print)
    assert resumed is not None
    assert resumed.step == 2
    with Report(config, "test", resumed=resumed) as report:
        weights = train(config, report).model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in straight[2].items())
    assert (tmp_path / "stopped" / "rollouts.jsonl").read_text() == straight[1]


def test_episodes_are_replaced_as_well(tiny, tmp_path) -> None:
    changes = {
        "model.scratch.alphabet": "0123456789+=?",
        "task": {"environment": {"object": "calculator", "max_turns": 2, "max_turn_tokens": 3}, "size": 20},
        "task.held_out": 6,
        "rollout.max_new_tokens": 10,
        "rollout.stop": ["?"],
        "advantage.turns": "to_go",
        "advantage.dynamic_sampling": {"max_num_gen_batches": 6},
        "checkpoint": None,
    }
    metrics, rollouts, _ = run(tiny, tmp_path / "run", changes)
    assert max(line["gen_batches"] for line in metrics) > 1
    assert [line["samples"] for line in metrics] == [16, 16]
    assert len(rollouts.splitlines()) == 32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout.group_size": 1, "advantage.kind": "reinforce_pp"}, "every group of `rollout.group_size: 1` is one"),
        ({"rollout.partial.extra_prompts": 2}, "`rollout.partial.extra_prompts` cannot be combined yet"),
        ({"rollout.save_to": "x"}, "`rollout.save_to` cannot be combined yet"),
        ({"rollout.replay": "x"}, "`rollout.replay` cannot be combined yet"),
    ],
)
def test_what_does_not_apply_is_refused(tiny, changes, said) -> None:
    with pytest.raises(ValueError, match=said):
        tiny({"advantage.dynamic_sampling": {}, **changes})
