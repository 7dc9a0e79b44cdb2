"""A rehearsal does what a run does and changes nothing; rollouts that were saved train as if they had just been
sampled."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from ebbtide import worker
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.cli import app
from ebbtide.config import load
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.optim.adamw import AdamW
from ebbtide.report.report import Report
from toy import state_of

AWAY = {
    "memory.preset": "lean",
    "loss.kl": {"coefficient": 0.1},
    "train.minibatches": 2,
    "checkpoint": None,
    "evaluate": {"every": 1, "problems": 4},
}


def run(config, rehearsal=None):
    with Report(config, "test") as report:
        policy = train(config, report, rehearsal)
    lines = [json.loads(line) for line in (report.folder.path / "metrics.jsonl").read_text().splitlines()]
    return lines, (report.folder.path / "rollouts.jsonl").read_text(), policy.model.state_dict()


@pytest.mark.parametrize("place", ["device", "streamed", "cpu"])
def test_with_an_optimizer_built_no_weight_and_no_moment_changes(tiny, tmp_path, monkeypatch, place) -> None:
    built, states = [], []
    monkeypatch.setattr(worker, "AdamW", lambda *arguments: built.append(AdamW(*arguments)) or built[-1])
    step = worker.Worker.optim_step
    monkeypatch.setattr(
        worker.Worker, "optim_step", lambda self, lr: states.append(state_of(built[0])) or step(self, lr)
    )
    config = tiny({**AWAY, "optimizer.place": place, "run.folder": str(tmp_path / "a")})
    lines, _, weights = run(config, "built")
    before = load_model(config).model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())
    assert len(states) == 4
    for moments, steps in states:
        assert steps == states[0][1]
        assert moments.keys() == states[0][0].keys()
        assert all(torch.equal(tensor, states[0][0][name]) for name, tensor in moments.items())
    if place == "device":
        assert sum(line["moved_gib"] for line in lines) > 0  # its state comes and goes as in training


def test_without_an_optimizer_nothing_of_one_is_made(tiny, tmp_path, monkeypatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("an optimizer was built")

    monkeypatch.setattr(worker, "AdamW", forbidden)
    lines, _, _ = run(tiny({**AWAY, "run.folder": str(tmp_path / "a")}), "none")
    assert not [key for line in lines for key in line if key.endswith(("/master", "/moments", "/grads")) and line[key]]
    assert all("mismatch" in line for line in lines[1:])


def test_a_rehearsal_samples_what_the_run_samples_first(tiny, tmp_path) -> None:
    rehearsed = run(tiny({**AWAY, "train.steps": 1, "run.folder": str(tmp_path / "a")}), "built")
    trained = run(tiny({**AWAY, "train.steps": 1, "run.folder": str(tmp_path / "b")}))
    assert rehearsed[1] == trained[1]
    for key in ("reward", "loss", "entropy", "kl", "mismatch"):
        assert rehearsed[0][1][key] == pytest.approx(trained[0][1][key], abs=0.05)


@pytest.mark.parametrize("ahead", [0, 3])
def test_saved_rollouts_train_as_if_they_had_just_been_sampled(tiny, tmp_path, ahead) -> None:
    file = str(tmp_path / "kept" / "rollouts.jsonl")
    sampled = run(
        tiny({"rollout.save_to": file, "rollout.partial.extra_prompts": ahead, "run.folder": str(tmp_path / "a")})
    )
    replayed = run(tiny({"rollout.replay": file, "run.folder": str(tmp_path / "b")}))
    assert replayed[1] == sampled[1]
    assert all(torch.equal(tensor, sampled[2][name]) for name, tensor in replayed[2].items())


def test_problems_with_one_prompt_are_told_apart_in_a_replay(tiny, tmp_path) -> None:
    tasks = tmp_path / "problems.jsonl"
    tasks.write_text(
        "".join(json.dumps({"prompt": "1=", "answer": answer}) + "\n" for answer in ("(?s).*", "(?!)"))
    )  # one is always right, one never
    task = {"file": {"train": str(tasks), "scorer": "regex"}, "held_out": 0}
    base = {"task": task, "evaluate": None, "rollout.prompts_per_step": 2, "train.steps": 1}
    file = str(tmp_path / "rollouts.jsonl")
    sampled = run(tiny({**base, "rollout.save_to": file, "run.folder": str(tmp_path / "a")}))
    replayed = run(tiny({**base, "rollout.replay": file, "run.folder": str(tmp_path / "b")}))
    assert [line["reward"] for line in replayed[0]] == [line["reward"] for line in sampled[0]] == [0.5]


def test_a_run_that_goes_on_adds_to_its_file(tiny, tmp_path) -> None:
    file = tmp_path / "rollouts.jsonl"
    base = {"rollout.save_to": str(file), "run.folder": str(tmp_path / "a"), "checkpoint.every": 1}
    file.write_text('{"step": 1, "of": "another run"}\n')
    run(tiny({**base, "train.steps": 1, "run.overwrite": True}))
    longer = tiny({**base, "train.steps": 3, "resume": "auto"})
    with Report(longer, "test", resumed=find_checkpoint(longer, print)) as report:
        train(longer, report)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1] * 4 + [2] * 4 + [3] * 4
    other = tmp_path / "other.jsonl"
    other.write_text(file.read_text())
    elsewhere = tiny({**base, "train.steps": 4, "resume": "auto", "rollout.save_to": str(other)})
    with pytest.raises(UserError, match="is not empty, and is not the file that this run wrote"):
        Report(elsewhere, "test", resumed=find_checkpoint(elsewhere, print))
    assert other.read_text() == file.read_text()


def test_files_that_cannot_be_replayed_are_named(tiny, tmp_path) -> None:
    file, folder = (
        tmp_path / "rollouts.jsonl",
        {
            "run.folder": str(tmp_path / "b"),
            "rollout.replay": str(tmp_path / "rollouts.jsonl"),
        },
    )
    with pytest.raises(UserError, match="cannot be read"):
        run(tiny(folder))
    run(tiny({"rollout.save_to": str(file), "train.steps": 1, "run.folder": str(tmp_path / "a")}))
    for changes, message in (
        ({"train.steps": 2}, r"no completions of step 2.*it has steps 1\): set train.steps=1"),
        (
            {"train.steps": 1, "rollout.group_size": 2},
            r"4 x 4 completions of step 1, and 4 x 2 are wanted.*`rollout.group_size`",
        ),
        (
            {"train.steps": 1, "seed": 5, "task.builtin": {"name": "copy", "options": {"digits": 2}}},
            "prompt that this `task`, `seed`",
        ),
        (
            {"train.steps": 1, "rollout.temperature": 0.5},
            r"sampled at temperature 1.0, and `rollout.temperature` is 0.5",
        ),
        (
            {"train.steps": 1, "rollout.max_new_tokens": 2},
            r"a completion of 6 tokens, and `rollout.max_new_tokens` is 2",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(tiny({**folder, **changes}))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    unsaid = [{key: value for key, value in line.items() if key != "temperature"} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in unsaid))
    run(tiny({**folder, "train.steps": 1, "rollout.temperature": 0.5, "run.overwrite": True}))
    file.write_text(json.dumps({**lines[0], "prompt": [3] * 9}) + "\n")
    with pytest.raises(UserError, match=r"a prompt of 9 tokens, and `rollout.max_prompt_tokens` is 8"):
        run(tiny({**folder, "train.steps": 1, "run.overwrite": True}))
    first = lines[0]["completions"][0]
    odd = (
        {**first, "tokens": []},
        {**first, "tokens": [99, *first["tokens"][1:]]},
        {**first, "logprobs": [0.0]},
        {**first, "finish": "x"},
    )
    for no_line in ({}, {**lines[0], "step": "x"}, *({**lines[0], "completions": [one]} for one in odd)):
        file.write_text(json.dumps(no_line) + "\n")
        with pytest.raises(UserError, match=r"not a file that `rollout.save_to` wrote"):
            run(tiny({**folder, "run.overwrite": True}))
    with pytest.raises(UserError, match=r"`rollout.partial.extra_prompts` is set"):
        load("quickstart", ["rollout.replay=x", "rollout.partial.extra_prompts=1"])


def test_the_command(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "task.size=40",
        "rollout.prompts_per_step=4",
        "rollout.group_size=2",
        "evaluate=null",
        "task.held_out=0",
        "rollout.stop=[' ']",
    ]
    given = [*small, "rollout.partial.extra_prompts=1", "run.folder=here"]
    result = CliRunner().invoke(
        app, ["rehearse", "quickstart", "--optimizer", "none", "--steps", "1", "--save-rollouts", "r.jsonl", *given]
    )
    assert result.exit_code == 0, result.output
    assert "rehearsed: 1 step" in result.output
    assert "every completion is in r.jsonl" in result.output
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "here" / "checkpoints").exists()
    assert isinstance(CliRunner().invoke(app, ["rehearse", "quickstart", "resume=auto"]).exception, UserError)

    itself, replay = (
        shlex.split(line.partition("   ")[0]) for line in result.output.partition("next:\n  ")[2].split("\n  ")[:2]
    )
    assert itself == ["ebbtide", "train", "quickstart", *small, "rollout.partial.extra_prompts=1", "run.folder=null"]
    assert replay == [
        "ebbtide",
        "train",
        "quickstart",
        *small,
        "run.folder=null",
        "rollout.partial.extra_prompts=0",
        "rollout.replay=r.jsonl",
        "train.steps=1",
    ]
    result = CliRunner().invoke(app, replay[1:])
    assert result.exit_code == 0, result.output
    assert "done: 1 step" in result.output
    assert "another seed" not in result.output
