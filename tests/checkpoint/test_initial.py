"""A run that starts from the weights of another run's newest checkpoint."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.export import read_model
from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.launch.job import Job
from ebbtide.launch.start import start_run
from ebbtide.parallel.comm import Comm
from ebbtide.report.report import Report
from ebbtide.worker import Worker


def run(folder, changes):
    said: list[str] = []
    tree = merged(TINY, {"run.folder": str(folder), "checkpoint": {"every": 1, "keep": 9}, **changes})
    config = with_runs_as_models(GrpoConfig.model_validate(tree), said.append)
    with Report(config, "test") as report:
        policy = train(config, report)
    return config, policy.model.state_dict(), said


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    run(folder, {})
    return folder


def from_run(folder, **more):
    return {"model": {"path": str(folder), **more}}


def test_it_starts_from_the_newest_checkpoint_and_holds_its_model_fixed(first, tmp_path) -> None:
    config, weights, said = run(tmp_path / "second", {**from_run(first), "optimizer.lr": 1e-30, "train.steps": 1})
    newest = list_checkpoints(first / "checkpoints")[-1]
    wanted = read_model(newest)[0].state_dict()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert config.model.path is None
    assert config.model.scratch is not None  # the first run's model
    assert config.model.weights == str(newest.path)
    assert said == [f"model: the weights are those of step 2 of {first}"]


def test_the_reference_of_its_kl_penalty_is_where_it_starts(first, tmp_path) -> None:
    kl = {"loss.kl": {"coefficient": 0.1}, "train.steps": 1, "advantage.drop_zero_std_groups": False}
    run(tmp_path / "second", {**from_run(first), **kl})
    (line,) = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert line["kl"] == 0


def test_what_is_set_beside_the_path_counts(first) -> None:
    config = GrpoConfig.model_validate(merged(TINY, from_run(first, chat_template=False)))
    assert with_runs_as_models(config, print).model.chat_template is False


def test_a_run_without_a_checkpoint_is_refused(tmp_path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    config = GrpoConfig.model_validate(merged(TINY, from_run(tmp_path / "empty")))
    with pytest.raises(UserError, match=r"`model.path: .*empty` is a run without a complete checkpoint"):
        with_runs_as_models(config, print)


def test_weights_that_are_gone_or_of_another_model_are_refused(first, tmp_path) -> None:
    with pytest.raises(UserError, match=r"`model.weights: .*gone` does not exist"):
        run(tmp_path / "a", {"model.weights": str(tmp_path / "gone")})
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    saved = list_checkpoints(first / "checkpoints")[-1]
    with pytest.raises(UserError, match="lacks model"):
        run(tmp_path / "b", {"model.weights": str(saved.path), "model.scratch.layers": 5})


@pytest.mark.parametrize("kl", [None, {"coefficient": 0.1}])
def test_a_run_that_resumes_needs_the_weights_it_started_from_only_for_a_reference(first, tmp_path, kl) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(first, gone)
    config, _, _ = run(tmp_path / "second", {**from_run(gone), "train.steps": 1, "loss.kl": kl})
    shutil.rmtree(gone)
    train_config = config.train.model_copy(update={"steps": 2})
    config = config.model_copy(update={"train": train_config, "resume": str(tmp_path / "second")})
    with Report(config, "test", resumed=find_checkpoint(config, print)) as report:
        if kl is None:
            train(config, report)
            assert report.steps_done == 2
        else:
            with pytest.raises(UserError, match=r"`model.weights: .*gone.*` does not exist"):
                train(config, report)


def test_rank_0_finds_the_checkpoint_for_all_ranks(first, monkeypatch) -> None:
    config = GrpoConfig.model_validate(merged(TINY, from_run(first)))
    found = with_runs_as_models(config, print)

    class Second(Comm):
        rank = 1

        def broadcast(self, value):
            return found

    monkeypatch.setattr("ebbtide.worker.with_runs_as_models", lambda *_: pytest.fail("this is rank 0's to do"))
    assert Worker(config, comm=Second()).config is found


def test_the_other_ranks_of_torchrun_leave_paths_to_the_first(monkeypatch, tmp_path) -> None:
    ran: list[Job] = []
    monkeypatch.setitem(sys.modules, "ebbtide.launch.run_rank", SimpleNamespace(run_rank=ran.append))
    job = Job("test", GrpoConfig.model_validate(merged(TINY, from_run(tmp_path / "absent"))), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"`model.path: .*absent` does not exist"):
        start_run(job, lambda text, style="": None)
    monkeypatch.setenv("RANK", "1")
    assert start_run(job, lambda text, style="": None) == 0
    assert ran == [job]
