"""DPO: TRL's losses written out, gradients through the whole model, and the same run however it is moved or resumed."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from conftest import TINY, assert_trained_alike
from ebbtide.algorithms.examples import pairs_as_update
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.memory.residency import Residency
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.policy.datum import Datum
from ebbtide.policy.losses.preference import preference_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.worker import Worker
from example_runs import DATA, config_of, preferences, resumes_to_the_bit, run, same, write_rows

LOSSES = {
    "sigmoid": {"kind": "sigmoid", "beta": 0.3},
    "sigmoid, smoothed": {"kind": "sigmoid", "beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"kind": "ipo", "beta": 0.4},
}
SETTINGS = {
    "optimizer.lr": 3e-3,
    "train.steps": 3,
    "evaluate": {"every": 1, "problems": 4},
    "loss.beta": 0.5,
}


@pytest.fixture
def dpo(tmp_path):
    """dpo("folder", {"train.steps": 3}): a config, whose data are pairs of several lengths."""
    file = write_rows(tmp_path / "data.jsonl", preferences())

    def make(folder, changes=None):
        changes = {"data": {"train": file, **DATA}, "run.folder": str(tmp_path / folder), **(changes or {})}
        return config_of("dpo", changes)

    return make


@pytest.fixture(scope="module")
def loaded():
    config = config_of("dpo", {"data": {"train": "x", **DATA}})
    loaded = load_model(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return config, loaded


def pairs_of(vocabulary: int, count: int = 5) -> list[list[Datum]]:
    """Sides of any length and mask, with log-probs of some reference."""
    draw = random.Random(2)

    def side(prompt: list[int]) -> Datum:
        tokens = prompt + [draw.randrange(vocabulary) for _ in range(draw.randint(2, 9))]
        targets = sorted(draw.sample(range(len(prompt), len(tokens)), draw.randint(1, len(tokens) - len(prompt))))
        return Datum(tokens, targets, {"reference_logprobs": torch.tensor([draw.uniform(-4, -1) for _ in targets])})

    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 5))] for _ in range(count)]
    return [[side(prompt), side(prompt)] for prompt in prompts]


def written_out(model, pairs, kind, beta, label_smoothing=0.0):
    """TRL's DPOTrainer on one sequence at a time: (loss, reward of each better side, reward of each worse side)."""
    losses, rewards = [], []
    for pair in pairs:
        sums, reference, counts = [], [], []
        for side in pair:
            logprobs = torch.log_softmax(model(torch.tensor([side.tokens]), use_cache=False).logits[0].float(), -1)
            sums.append(sum(logprobs[target - 1, side.tokens[target]] for target in side.targets))
            reference.append(side.values["reference_logprobs"].sum())
            counts.append(len(side.targets))
        chosen, rejected = sums[0] - reference[0], sums[1] - reference[1]
        if kind == "ipo":
            delta = chosen / counts[0] - rejected / counts[1]
            losses.append((delta - 1 / (2 * beta)) ** 2)
        else:
            delta = chosen - rejected
            smooth = label_smoothing
            losses.append(-logsigmoid(beta * delta) * (1 - smooth) - logsigmoid(-beta * delta) * smooth)
        rewards.append((beta * chosen.item(), beta * rejected.item()))
    return torch.stack(losses).mean(), rewards


class WithAnIdleRound(Comm):
    def max_rounds(self, mine: int) -> int:
        return mine + 1


@pytest.mark.parametrize("comm", [Comm(), WithAnIdleRound()], ids=["busy", "idle round"])
@pytest.mark.parametrize("budget", [32, 512])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_and_metrics_are_those_of_the_formula(loaded, name, budget, comm) -> None:
    config, one = loaded
    config = config.model_copy(update={"train": config.train.model_copy(update={"microbatch_tokens": budget})})
    pairs, model = pairs_of(len(one.tokenizer)), one.model
    model.zero_grad()
    wanted, rewards = written_out(model, pairs, **LOSSES[name])
    wanted.backward()
    gradients = {key: weight.grad.clone() for key, weight in model.named_parameters()}
    model.zero_grad()

    def loss(inputs):
        return preference_loss(inputs, **LOSSES[name])

    found = Policy(one, config, comm).forward_backward(pairs_as_update(pairs), loss, no_progress)
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    for key, weight in model.named_parameters():
        torch.testing.assert_close(
            weight.grad, gradients[key], rtol=1e-4, atol=1e-6, msg=lambda text, key=key: key + text
        )
    model.zero_grad()
    margins = [chosen - rejected for chosen, rejected in rewards]
    assert found["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 5)
    assert 0 < found["accuracy"] < 1
    assert found["margin"] == pytest.approx(sum(margins) / 5, rel=1e-4)
    assert found["reward_chosen"] == pytest.approx(sum(chosen for chosen, _ in rewards) / 5, rel=1e-4)
    assert found["reward_rejected"] == pytest.approx(sum(rejected for _, rejected in rewards) / 5, rel=1e-4)


def test_a_run_prefers_the_better_side_more_and_more(dpo) -> None:
    lines, _ = run(dpo("a", {**SETTINGS, "train.steps": 10}))
    assert lines[0]["evaluate/margin"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    assert lines[0]["evaluate/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert lines[1]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert lines[-1]["evaluate/loss"] < 0.6
    assert lines[-1]["evaluate/accuracy"] > 0.8
    assert lines[-1]["evaluate/margin"] > 0.2


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_a_reference_of_each_step_is_the_one_that_was_stored(dpo, kind) -> None:
    """Twenty-four pairs, eight per step, four steps: the last is of a second epoch. Before the first step they were
    packed in another way, and on some CPUs a row of a matmul depends on the number of rows."""
    whole = {**SETTINGS, "loss.kind": kind, "train.steps": 4}
    once = run(dpo("once", whole))
    each = run(dpo("each", {**whole, "loss.reference": "each_step"}))
    for mine, theirs in zip(once[0], each[0], strict=True):
        for name in {"loss", "grad_norm", "evaluate/loss"} & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), (theirs["step"], name)
    assert_trained_alike(once[1], each[1], lr=1e-3, steps=4)


@pytest.mark.parametrize("reference", ["once", "each_step"])
def test_a_batch_in_which_an_epoch_ends_may_have_a_pair_twice(tmp_path, reference) -> None:
    """Of three pairs a batch of eight has some three times, each of which counts."""
    file = write_rows(tmp_path / "few.jsonl", preferences(3))
    changes = {"data": {"train": file, **DATA}, "loss.reference": reference, "run.folder": str(tmp_path / "a")}
    config = config_of("dpo", {**changes, "train.steps": 2})
    lines, _ = run(config)
    assert len(lines) == 2
    assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert lines[1]["loss"] < lines[0]["loss"]


def test_a_pair_twice_weighs_twice(loaded) -> None:
    config, one = loaded
    first, second = pairs_of(len(one.tokenizer), 2)
    model, policy = one.model, Policy(one, config)

    def loss(inputs):
        return preference_loss(inputs, kind="sigmoid", beta=0.3)

    values = [policy.forward_only(pairs_as_update(pairs), loss, no_progress)["loss"] for pairs in ([first], [second])]
    thrice = policy.forward_only(pairs_as_update([first, second, first]), loss, no_progress)["loss"]
    assert thrice == pytest.approx((2 * values[0] + values[1]) / 3, rel=1e-5)
    assert not any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize("reference", ["once", "each_step"])
def test_a_resumed_run_is_the_run_that_never_stopped(dpo, tmp_path, reference) -> None:
    changes = {**SETTINGS, "data": dpo("x").data.model_dump(), "loss.reference": reference}
    resumes_to_the_bit("dpo", tmp_path, changes)


@pytest.mark.parametrize(("steps", "after_resume"), [(5, 1), (12, 6)], ids=["within an epoch", "two epochs"])
def test_the_reference_is_computed_in_slices_for_the_pairs_that_are_still_drawn(
    dpo, monkeypatch, steps, after_resume
) -> None:
    """24 pairs in batches of 4: an epoch has 6 steps."""
    seen: list[int] = []
    entered: list[str] = []
    compute, enter = Worker.logprobs, Residency.enter

    def logprobs(worker, data, name, *more, **options) -> None:
        assert entered[-1] == "evaluate"  # which the plan knows: in it the optimizer's state may be away
        compute(worker, data, name, *more, **options)
        seen.append(len(data))

    monkeypatch.setattr(Worker, "logprobs", logprobs)
    monkeypatch.setattr(Residency, "enter", lambda residency, phase: (entered.append(phase), enter(residency, phase)))
    saves = {"every": 4, "keep": 9, "async_save": False}
    whole = {"data.batch_size": 4, "train.steps": steps, "checkpoint": saves, "evaluate": {"every": 4, "problems": 4}}
    lines, _ = run(dpo("a", whole))
    assert seen == [8] * min(steps, 6) + [8, 4]  # and 6 held-out pairs
    assert "seconds/evaluate" not in lines[1]  # it is no part of the first step
    for saved in list_checkpoints(Path(dpo("a").run.folder) / "checkpoints"):
        if saved.step > 4:
            shutil.rmtree(saved.path)
    seen.clear()
    again = dpo("a", {**whole, "resume": "auto"})
    run(again, find_checkpoint(again, print))
    assert seen == [8] * after_resume + [8, 4]


@pytest.mark.parametrize("reference", ["once", "each_step"])
def test_moving_everything_away_changes_no_bit(dpo, reference) -> None:
    whole = {**SETTINGS, "loss.reference": reference}
    assert same(run(dpo("lean", {**whole, "memory.preset": "lean"})), run(dpo("kept", whole)))


def test_a_rehearsal_changes_nothing(dpo) -> None:
    config = dpo("a", {**SETTINGS, "train.steps": 2, "loss.reference": "each_step"})
    lines, weights = run(config, rehearsal="built")
    before = load_model(config).model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert [line["loss"] for line in lines[1:]] == pytest.approx([0.693147] * 2, abs=1e-5)


def test_a_task_is_evaluated_on_as_well(dpo) -> None:
    rollout = {"max_prompt_tokens": 8, "max_new_tokens": 6}
    lines, _ = run(dpo("a", {**SETTINGS, "train.steps": 1, "task": TINY["task"], "rollout": rollout}))
    assert all({"evaluate/pass@1", "evaluate/margin"} <= line.keys() for line in lines)
