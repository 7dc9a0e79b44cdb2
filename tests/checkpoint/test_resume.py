"""A run that stops and goes on is the run that never stopped, to the bit; what is damaged is found, named and passed over."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.checkpoint.export import export, pick
from ebbtide.checkpoint.resume import find
from ebbtide.checkpoint.store import UNFINISHED, listed, prune, write
from ebbtide.errors import UserError
from ebbtide.loop import train
from ebbtide.report.report import Report

MEASURED = ("seconds", "tokens_per_second", "peak_gib", "reserved_gib", "device_gib", "host_gib", "moved_gib")

EVERYTHING = {
    "train.minibatches": 2,
    "loss.kl": {"coefficient": 0.1},
    "rollout.samples": 8,
    "optimizer.weight_decay": 0.1,
    "optimizer.schedule": "cosine",
    "evaluate": {"every": 2, "problems": 6},
    "task.size": 10,  # so that the sampler is in its second epoch
    "checkpoint": {"every": 2, "keep": 2, "keep_best": 0},
    "train.steps": 5,
}
MODES = {
    "device": {},
    "streamed": {"optimizer.place": "streamed", "memory.preset": "lean"},
    "cpu": {"optimizer.place": "cpu"},
    "split": {"optimizer.cpu_fraction": 0.4, "memory.preset": "lean"},
}


def run(config, resumed=None):
    """(metrics without what is measured, rollouts, weights)."""
    with Report(config, "test", resumed=resumed) as report:
        weights = train(config, report).model.state_dict()
        folder = report.folder.path
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return metrics, (folder / "rollouts.jsonl").read_text(), weights


def same(one, other) -> bool:
    return one[:2] == other[:2] and all(torch.equal(one[2][key], other[2][key]) for key in one[2])


def stop_after(folder: Path, step: int) -> None:
    """As if the run had been killed some time after a checkpoint: later ones are gone, its lines are not."""
    for saved in listed(folder / "checkpoints"):
        if saved.step > step:
            shutil.rmtree(saved.path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_that_never_stopped(tiny, tmp_path, mode, dtype) -> None:
    changes = {**EVERYTHING, **MODES[mode], "model.dtype": dtype}
    straight = run(tiny({**changes, "run.folder": str(tmp_path / "straight")}))
    config = tiny({**changes, "run.folder": str(tmp_path / "stopped")})
    run(config)
    stop_after(tmp_path / "stopped", 4)
    (tmp_path / "stopped" / "metrics.jsonl").open("a").write('{"step": 5, "cut')  # killed in the middle of a line
    again = tiny({**changes, "run.folder": str(tmp_path / "stopped"), "resume": "auto"})
    resumed = find(again, print)
    assert resumed.step == 4
    assert same(run(again, resumed), straight)


def test_another_optimizer_mode_goes_on_from_the_same_state(tiny, tmp_path) -> None:
    config = tiny({**EVERYTHING, "run.folder": str(tmp_path / "a")})
    straight = run(config)
    stop_after(tmp_path / "a", 4)
    said: list[str] = []
    again = tiny({**EVERYTHING, "run.folder": str(tmp_path / "a"), "resume": "auto", "optimizer.place": "streamed"})
    resumed = find(again, said.append)
    assert said == ["since the checkpoint, `optimizer.place` was 'device' and is 'streamed'"]
    assert same(run(again, resumed), straight)  # streamed is the device to the bit


def test_another_model_is_another_run(tiny, tmp_path) -> None:
    run(tiny({**EVERYTHING, "train.steps": 2, "run.folder": str(tmp_path / "a")}))
    for key, value in (("seed", 7), ("model.scratch.layers", 3), ("optimizer.state_dtype", "bfloat16")):
        with pytest.raises(UserError, match=f"`{key}` was"):
            find(tiny({**EVERYTHING, key: value, "run.folder": str(tmp_path / "a"), "resume": "auto"}), print)
    with pytest.raises(UserError, match="raise it to go on"):
        find(tiny({**EVERYTHING, "train.steps": 2, "resume": str(tmp_path / "a")}), print)


def test_where_resume_looks(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = {**EVERYTHING, "train.steps": 2, "run.name": "mine"}
    assert find(tiny({**fresh, "resume": "auto"}), print) is None
    run(tiny(fresh))
    longer = {**fresh, "train.steps": 3}
    place = Path("runs/mine-001/checkpoints/step-000002")
    for where in ("auto", "runs/mine-001", str(place)):
        assert find(tiny({**longer, "resume": where}), print).path == place
    assert find(tiny(longer), print) is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        find(tiny({**longer, "resume": "runs/elsewhere"}), print)


@pytest.fixture
def two(tmp_path) -> Path:
    """A folder with two checkpoints of two files each."""

    def fill(number: int):
        def into(folder: Path) -> None:
            (folder / "sub").mkdir()
            (folder / "a").write_bytes(bytes([number]) * 5000)
            (folder / "sub" / "b").write_bytes(b"hello")

        return into

    for step in (1, 2):
        write(tmp_path / "c", step, {"reward": -float(step)}, fill(step))
    return tmp_path / "c"


DAMAGE = {
    "truncated": (lambda path: (path / "a").write_bytes(b"\2" * 4999), "a has 4999 bytes instead of 5000"),
    "flipped bit": (lambda path: (path / "a").write_bytes(b"\2" * 4999 + b"\3"), "a has other contents"),
    "missing": (lambda path: (path / "sub" / "b").unlink(), "b is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_one_before_is_offered(two, kind) -> None:
    from ebbtide.checkpoint.store import newest_sound

    damage, words = DAMAGE[kind]
    damage(two / "step-000002")
    said: list[str] = []
    assert newest_sound(listed(two), said.append).step == 1
    assert words in said[0]
    assert "going back to the one before" in said[0]


def test_a_checkpoint_without_its_manifest_is_none(two) -> None:
    (two / "step-000002" / "manifest.json").write_text('{"step": 2, "fil')
    assert [saved.step for saved in listed(two)] == [1]


def test_a_write_that_fails_leaves_the_others_and_no_half(two) -> None:
    def fails(folder: Path) -> None:
        (folder / "a").write_bytes(b"1")
        raise OSError("no space left on device")

    with pytest.raises(UserError, match=r"step 3 could not be written.*no space left.*Earlier ones are untouched"):
        write(two, 3, {}, fails)
    assert [saved.step for saved in listed(two)] == [1, 2]
    assert all(saved.problem() is None for saved in listed(two))
    write(two, 3, {}, lambda folder: (folder / "a").write_bytes(b"1"))
    assert not list(two.glob(f"{UNFINISHED}*"))


def test_the_newest_and_the_best_are_kept(two) -> None:
    for step in (3, 4, 5):
        write(two, step, {"reward": -float(step)}, lambda folder: (folder / "a").write_bytes(b"1"))
    prune(two, last=2, best=1, metric="reward")
    assert [saved.step for saved in listed(two)] == [1, 4, 5]
    prune(two, last=1, best=0, metric="reward")
    assert [saved.step for saved in listed(two)] == [5]


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from ebbtide.checkpoint.store import prune, write
folder, moment = Path(sys.argv[1]), float(sys.argv[2])
threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
step = 0
while True:
    step += 1
    def fill(place):
        for name in "abcdef":
            (place / name).write_bytes(name.encode() * 200_000)
    write(folder, step, {"reward": 0.0}, fill)
    prune(folder, last=2, best=0, metric="reward")
    print(step, flush=True)
"""


@pytest.mark.parametrize("number", range(12))
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path, number) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(0.02 + 0.013 * number)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9
    finished = [int(line) for line in done.stdout.split()]
    found = listed(tmp_path)
    assert all(saved.problem() is None for saved in found)
    if finished:
        assert found[-1].step >= finished[-1]


def test_export_is_an_ordinary_model(tiny, tmp_path) -> None:
    config = tiny({**EVERYTHING, "train.steps": 2, "model.dtype": "bfloat16", "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        trained = train(config, report)
    export(pick(tmp_path / "run", None), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    mine = trained.model.state_dict()
    assert all(torch.equal(mine[key], value) for key, value in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12=").input_ids == trained.tokenizer("12=").input_ids
    with pytest.raises(UserError, match="not empty"):
        export(pick(tmp_path / "run", None), tmp_path / "out")
    with pytest.raises(UserError, match="no complete checkpoint of step 9"):
        pick(tmp_path / "run", 9)
