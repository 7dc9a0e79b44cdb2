"""Groups that outlast a step: they end as they would have alone, nothing of them is lost, and a run that stops and
goes on is the run that never stopped."""

import json
from contextlib import suppress

import pytest
import torch

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.config import load
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import host_bytes
from ebbtide.report.report import Report
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.prompts import encode_prompts
from ebbtide.rollout.sources import PartialRollouts, build_source
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler

AHEAD = {
    "rollout.partial.extra_prompts": 3,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 40,
    "rollout.temperature": 2.0,
}  # of very different lengths


def rollouts_of(config):
    """Rollouts of a model that never learns, with what they stand on."""
    loaded = load_model(config)
    problems = build_task(config.task, config.seed, evaluated=False).problems()
    prompts = encode_prompts(problems.train, loaded.tokenizer, loaded.vocabulary_rows, config, lambda *_: None)
    engine = PagedEngine(loaded, config.rollout.max_num_seqs, block=4)
    residency = Residency(plan_holdings(config), torch.device("cpu"))
    return (
        build_source(config, engine, Sampler(prompts, config.seed), prompts, residency, rows=loaded.vocabulary_rows),
        residency,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout.partial.kv_cache": "keep"},
        {"rollout.partial.kv_cache": "keep", "memory.preset": "lean"},
        {"rollout.partial.kv_cache": "keep", "memory.offload": {"train": ["kv_cache"]}},
    ],
)
def test_with_weights_that_stay_a_group_ends_as_it_would_have_alone(tiny, changes) -> None:
    config = tiny({**AHEAD, **changes})
    rollouts, residency = rollouts_of(config)
    begun = []
    add = rollouts._persistent.session.add
    rollouts._persistent.session.add = lambda request, sampling: begun.append(request) or add(request, sampling)
    found, ages = {}, []
    for step in range(1, 8):
        with residency.phase("generate"):
            prompts, groups = rollouts.next(step, lambda done, of: None)
        with residency.phase("train"):
            pass
        assert len(prompts) == config.rollout.prompts_per_step
        assert rollouts.metrics()["unfinished_groups"] == 3
        ages.append(rollouts.metrics()["staleness_max"])
        found |= {tuple(prompt.tokens): group for prompt, group in zip(prompts, groups, strict=True)}
    assert max(ages) > 0
    alone = rollouts._engine.generate(begun, rollouts._sampling, lambda *_: None)
    straight = {tuple(request.prompt): group for request, group in zip(begun, alone, strict=True)}
    assert len(found) == 28
    for prompt, group in found.items():
        assert [(one.tokens, one.finish, one.text) for one in group] == [
            (one.tokens, one.finish, one.text) for one in straight[prompt]
        ]
        for one, other in zip(group, straight[prompt], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_what_is_kept_is_a_holding_that_leaves_when_the_plan_says_so(tiny) -> None:
    config = tiny({**AHEAD, "rollout.partial.kv_cache": "keep", "memory.offload": {"train": ["kv_cache"]}})
    rollouts, residency = rollouts_of(config)
    with residency.phase("generate"):
        rollouts.next(1, lambda *_: None)
        kept = residency.holdings()["kv_cache"]
    assert kept.device > 0
    with residency.phase("train"):
        assert residency.holdings()["kv_cache"].device == 0
    with residency.phase("generate"):
        rollouts.next(2, lambda *_: None)
    assert residency.meter.run_rows["train"].moved.bytes_out == kept.device


def test_host_memory_for_what_is_kept_is_taken_once_and_counted_before(tiny) -> None:
    config = tiny(
        {**AHEAD, "rollout.partial.kv_cache": "keep", "memory.offload": {"train": ["kv_cache"]}, "checkpoint": None}
    )
    rollouts, residency = rollouts_of(config)
    pinned = residency.host_bytes
    assert pinned > 0
    for step in range(1, 15):
        with residency.phase("generate"):
            rollouts.next(step, lambda *_: None)
        with residency.phase("train"):
            assert residency.host_bytes == pinned
    counted = host_bytes(config, residency.plan)["kv_cache"]
    assert 0.5 < counted / pinned < 2  # blocks are smaller here than they usually are


def test_short_groups_come_first_and_old_ones_are_not_forgotten(tiny) -> None:
    rollouts, residency = rollouts_of(tiny({**AHEAD, "rollout.partial.extra_prompts": 12}))
    assert isinstance(rollouts, PartialRollouts)
    ages = []
    for step in range(1, 30):
        with residency.phase("generate"):
            rollouts.next(step, lambda *_: None)
        ages.append(rollouts.metrics()["staleness_max"])
    assert max(ages) > 0
    assert max(ages) < 40  # with 40 tokens at most, nobody waits for ever


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_what_goes_wrong_inside_costs_no_token_that_was_known(tiny, cache) -> None:
    def sampled(interrupted: bool) -> list[list[int]]:
        rollouts, residency = rollouts_of(tiny({**AHEAD, "rollout.partial.kv_cache": cache}))
        with residency.phase("generate"):
            rollouts.next(1, lambda *_: None)
        if interrupted:
            with suppress(KeyboardInterrupt), rollouts._persistent.resumed() as session:
                for _ in range(3):
                    session.step()
                raise KeyboardInterrupt
        with residency.phase("generate"):
            _, groups = rollouts.next(2, lambda *_: None)
        return sorted(one.tokens for group in groups for one in group)

    assert sampled(True) == sampled(False)


def run(config, resumed=None):
    with Report(config, "test", resumed=resumed) as report:
        policy = train(config, report)
    lines = [json.loads(line) for line in (report.folder.path / "metrics.jsonl").read_text().splitlines()]
    rollouts = (report.folder.path / "rollouts.jsonl").read_text()
    assert any("loss" in line for line in lines)
    figures = [
        {key: line.get(key) for key in ("step", "reward", "staleness", "unfinished_groups", "loss")} for line in lines
    ]
    return figures, rollouts, {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


@pytest.mark.slow
def test_a_run_that_stops_with_groups_under_way_goes_on_to_the_bit(tiny, tmp_path) -> None:
    base = {**AHEAD, "rollout.partial.extra_prompts": 4, "rollout.group_size": 8, "checkpoint.every": 2}
    straight = run(tiny({**base, "train.steps": 5, "run.folder": str(tmp_path / "a")}))
    run(tiny({**base, "train.steps": 2, "run.folder": str(tmp_path / "b")}))
    longer = {**base, "train.steps": 5, "run.folder": str(tmp_path / "b"), "resume": "auto"}
    assert max(figures["staleness"] for figures in straight[0]) > 0
    figures, rollouts, weights = run(tiny(longer), find_checkpoint(tiny(longer), print))
    assert (figures, rollouts) == straight[:2]
    assert all(torch.equal(tensor, straight[2][name]) for name, tensor in weights.items())
    for changes, message in (
        ({"rollout.partial.extra_prompts": 0}, r"`rollout.partial.extra_prompts: 0`"),
        ({"task.size": 30}, "resume with the task"),
        ({"rollout.group_size": 4}, r"`rollout.group_size` is 4"),
        ({"rollout.max_new_tokens": 1}, r"`rollout.max_new_tokens: 1`"),
    ):
        config = tiny({**longer, "train.steps": 6, **changes})
        with pytest.raises(UserError, match=message):
            run(config, find_checkpoint(config, print))


def test_what_cannot_be_is_refused() -> None:
    for options, message in (
        (["rollout.partial.extra_prompts=2", "rollout.engine=huggingface"], "needs `rollout.engine: paged`"),
        (["rollout.partial.kv_cache=keep"], "`rollout.partial.extra_prompts: 0`"),
        (["memory.offload.generate=[kv_cache]"], "the generate phase needs it"),
    ):
        with pytest.raises(UserError, match=message):
            plan_holdings(load("quickstart", options))
