"""SFT is a plain loop of cross-entropy and AdamW, at every step; and the same run however it is cut, moved or
resumed."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from ebbtide.algorithms.data import read_data
from ebbtide.algorithms.examples import Examples
from ebbtide.model.load import load_model
from ebbtide.report.null_report import NullReport
from ebbtide.rollout.examples import ExampleEncoder, encode_examples, read_example_rows
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.task import Problems
from example_runs import DATA, config_of, digits, resumes_to_the_bit, run, same, write_rows

SETTINGS = {
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": [0.8, 0.95],
    "optimizer.clip_norm": 0.5,
    "optimizer.lr": 3e-3,
    "train.steps": 12,
    "evaluate": {"every": 1, "problems": 4},
}
TASK = {
    "builtin": {"name": "copy", "options": {"digits": 3}},
    "size": 20,
    "held_out": 8,
    "scoring": {"workers": 1},
}
SAMPLED = {"task": TASK, "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 6}


@pytest.fixture
def sft(tmp_path):
    """sft("folder", {"train.steps": 3}): a config, whose data are prompts with completions of several lengths."""
    file = write_rows(tmp_path / "data.jsonl", digits())

    def make(folder, changes=None):
        changes = {"data": {"train": file, **DATA}, "run.folder": str(tmp_path / folder), **(changes or {})}
        return config_of("sft", changes)

    return make


def plain_loop(config) -> list[float]:
    """The held-out loss before the first step and after each: transformers' forward on one sequence at a time, torch's
    cross-entropy on the same positions, and torch's AdamW."""
    loaded = load_model(config)
    model, ends = loaded.model, loaded.end_tokens
    rows = digits()
    examples = []
    for row in rows:
        prompt, completion = (loaded.tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        labels = [-100] * len(prompt) + completion + ends
        examples.append((torch.tensor([prompt + completion + ends]), torch.tensor(labels)))
    train, held_out = examples[: -config.data.held_out_rows], examples[-config.data.held_out_rows :]

    def loss_of(some) -> torch.Tensor:
        total = sum(
            cross_entropy(model(ids, use_cache=False).logits[0, :-1], labels[1:], reduction="sum")
            for ids, labels in some
        )
        return total / sum((labels != -100).sum() for _, labels in some)

    settings = config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps)
    order, losses = Sampler(train, config.seed), []
    for step in range(config.train.steps + 1):
        with torch.no_grad():
            losses.append(loss_of(held_out).item())
        if step < config.train.steps:
            loss_of(order.draw(config.data.batch_size)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_every_step_has_the_held_out_loss_of_a_plain_loop(sft, tied) -> None:
    """Four epochs, several micro-batches in each step, with clipping and weight decay."""
    config = sft("a", {**SETTINGS, "model.scratch.tied": tied})
    lines, _ = run(config)
    found, wanted = [line["evaluate/loss"] for line in lines], plain_loop(config)
    assert len(found) == 13
    assert found == pytest.approx(wanted, rel=0, abs=1e-5)
    assert found[-1] < found[0] - 0.4  # which says more than two loops that learn nothing


def test_the_loss_that_a_step_reports_is_the_mean_over_its_targets(sft) -> None:
    config = sft("a", {"train.steps": 1})
    ((line,), _) = run(config)
    loaded = load_model(config)
    encoder = ExampleEncoder(loaded, config, config.data.max_tokens, config.data.overlong)
    rows = read_example_rows(config.data, evaluated=False)
    examples = encode_examples(rows.train, encoder, config.data, lambda done, of: None)
    assert len(examples) == 30  # nothing is set aside where nothing is evaluated
    losses = []
    for (datum,) in Sampler(examples, config.seed).draw(config.data.batch_size):
        logits = loaded.model(torch.tensor([datum.tokens])).logits[0]
        losses += [cross_entropy(logits[target - 1], torch.tensor(datum.tokens[target])) for target in datum.targets]
    assert line["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_a_resumed_run_is_the_run_that_never_stopped(sft, tmp_path) -> None:
    changes = {**SETTINGS, "data": sft("x").data.model_dump(), "optimizer.schedule": "cosine"}
    resumes_to_the_bit("sft", tmp_path, changes)


def test_a_resumed_run_with_other_data_is_warned_of(sft, tmp_path, capsys) -> None:
    from ebbtide.checkpoint.resume import find_checkpoint

    saving = {"checkpoint": {"every": 2, "async_save": False}, "train.steps": 2}
    run(sft("a", saving))
    write_rows(tmp_path / "data.jsonl", digits()[::-1])
    again = sft("a", {**saving, "train.steps": 3, "resume": "auto"})
    run(again, find_checkpoint(again, print))
    assert "changed" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{}, SAMPLED], ids=["examples", "examples and a task"])
def test_moving_everything_away_changes_no_bit(sft, changes) -> None:
    whole = {**SETTINGS, **changes, "train.steps": 3}
    assert same(run(sft("lean", {**whole, "memory.preset": "lean"})), run(sft("kept", whole)))


def test_the_run_is_the_same_however_micro_batches_are_cut(sft) -> None:
    one, other = (run(sft(f"{n}", {**SETTINGS, "train.steps": 3, "train.microbatch_tokens": n})) for n in (32, 512))
    for line, again in zip(one[0], other[0], strict=True):
        assert line["evaluate/loss"] == pytest.approx(again["evaluate/loss"], abs=1e-6)
        assert line.get("loss", 0) == pytest.approx(again.get("loss", 0), abs=1e-6)


def test_an_evaluation_has_the_loss_and_where_there_is_a_task_also_rewards(sft) -> None:
    alone = run(sft("alone", SETTINGS))
    sampled = run(sft("task", {**SETTINGS, **SAMPLED}))
    assert "evaluate/pass@1" not in alone[0][0]
    assert {"evaluate/pass@1", "evaluate/reward"} <= sampled[0][0].keys()
    assert [line["evaluate/loss"] for line in sampled[0]] == [line["evaluate/loss"] for line in alone[0]]
    assert same((alone[0][:0], alone[1]), (sampled[0][:0], sampled[1]))  # an evaluation changes nothing
    assert [line["step"] for line in run(sft("none", {"train.steps": 2}))[0]] == [1, 2]


def test_an_evaluation_does_not_pass_over_a_task_that_has_nothing_held_out(sft, tmp_path) -> None:
    from ebbtide.errors import UserError

    class Nothing:
        def problems(self) -> Problems:
            return Problems([], [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebbtide.algorithms.data.build_task", lambda config, seed, evaluated: Nothing())
        with pytest.raises(UserError, match="held-out problems"):
            run(sft("a", {**SETTINGS, **SAMPLED}))


@pytest.mark.parametrize("kind", ["built", "none"])
def test_a_rehearsal_changes_nothing(sft, kind) -> None:
    config = sft("a", {**SETTINGS, "train.steps": 2})
    lines, weights = run(config, rehearsal=kind)
    before = load_model(config).model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert len({line["evaluate/loss"] for line in lines}) == 1
    first, *_ = run(sft("b", {**SETTINGS, "train.steps": 2}))
    assert lines[1]["loss"] == first[1]["loss"]


def test_an_epoch_draws_every_example_once(sft) -> None:
    from ebbtide.worker import Worker

    config = sft("a", {"data.batch_size": 10})
    with Worker(config, NullReport(Path(config.run.folder))) as worker:
        examples = Examples(worker, read_data(config))
        drawn = [datum for _ in range(3) for datum in examples.next()]
        again = examples.next()
    assert len({tuple(datum.tokens) for datum in drawn}) == 30
    drawn[0].values["mark"] = 1.0
    assert not any("mark" in datum.values for datum in again)  # values of one step never reach another
