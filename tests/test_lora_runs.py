"""Runs with adapters: they learn, resume to the bit, save little, and are exported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conftest import TINY, family, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.export import export, read_model
from ebbtide.checkpoint.index import read_index
from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.checkpoint.resume import find_checkpoint
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError
from ebbtide.launch.serve import load_served
from ebbtide.model.load import load_model
from ebbtide.model.lora import adapted_layers
from ebbtide.planner.run_plan import model_shape
from ebbtide.policy.datum import Datum
from ebbtide.report.report import Report
from ebbtide.worker import Worker
from example_runs import DATA, config_of, digits, preferences, write_rows

CPU = torch.device("cpu")
LORA = {"model.lora": {"rank": 4}, "optimizer.lr": 1e-2, "checkpoint": {"every": 2, "keep": 9}, "train.steps": 4}


def settings(folder: Path, changes: dict | None = None) -> GrpoConfig:
    return GrpoConfig.model_validate(merged(TINY, {**LORA, "run.folder": str(folder), **(changes or {})}))


def run(folder: Path, changes: dict | None = None):
    config = with_runs_as_models(settings(folder, changes), print)
    resumed = find_checkpoint(config, print)
    with Report(config, "test", resumed=resumed) as report:
        return train(config, report).model


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the folder of a run of four steps, its model)."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    return folder, run(folder)


def test_the_base_stays_as_it_was(whole) -> None:
    folder, model = whole
    base = load_model(settings(folder), CPU).model.state_dict()
    found = model.state_dict()
    assert all(torch.equal(found[name], base[name]) for name in base)
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())


def test_the_sampler_has_the_adapters_of_the_trainer(whole) -> None:
    found = [line["mismatch_max"] for line in lines(whole[0]) if line["step"] > 0]
    assert len(found) == 4
    assert max(found) < 1e-5


def test_a_mixture_of_experts_trains_the_adapters_of_its_attention(tmp_path) -> None:
    folder, sparse = tmp_path / "run", family("qwen3_moe")
    model = run(folder, sparse)
    base, found = load_model(settings(folder, sparse), CPU).model.state_dict(), model.state_dict()
    assert any(".experts." in name for name in base)
    assert all(torch.equal(found[name], base[name]) for name in base)
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())
    assert max(line["mismatch_max"] for line in lines(folder) if "mismatch_max" in line) < 1e-5
    export(folder, tmp_path / "merged", merge=True, say=print)
    merged_model = load_model(settings(folder, {"model": {"path": str(tmp_path / "merged")}}), CPU).model
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(merged_model(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


def test_it_resumes_to_the_bit(whole, tmp_path) -> None:
    folder, model = whole
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "checkpoints" / "step-000004")
    resumed = run(again, {"resume": str(again)}).state_dict()
    found = model.state_dict()
    assert found.keys() == resumed.keys()
    assert all(torch.equal(found[name], resumed[name]) for name in found)


def save_base(folder: Path, *, tied: bool = True) -> Path:
    """The tiny model, as a folder that `model.path` may name."""
    loaded = load_model(settings(folder, {"model.scratch.tied": tied}), CPU)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_folder(tmp_path_factory):
    """(the folder of a run with adapters for a model in a folder, that folder)."""
    place = tmp_path_factory.mktemp("based")
    save_base(place / "base")
    run(place / "run", {"model": {"path": str(place / "base"), "lora": {"rank": 4}}})
    return place / "run", place / "base"


def test_a_checkpoint_has_the_adapters_alone(on_folder) -> None:
    saved = list_checkpoints(on_folder[0] / "checkpoints")[-1]
    names = {key.partition(".")[2] for key in read_index(CheckpointFiles(saved.path)) if key.startswith("model.")}
    assert len(names) == 28
    assert all(".lora_" in name for name in names)


def test_a_base_that_is_nowhere_else_is_saved_with_them(whole) -> None:
    saved = list_checkpoints(whole[0] / "checkpoints")[-1]
    names = {key.partition(".")[2] for key in read_index(CheckpointFiles(saved.path)) if key.startswith("model.")}
    assert names == {name for name, _ in whole[1].named_parameters()}


def test_another_base_is_refused(on_folder, tmp_path) -> None:
    shutil.copytree(on_folder[0], tmp_path / "run")
    shutil.copytree(on_folder[1], tmp_path / "base")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    model = {"path": str(on_folder[1]), "lora": {"rank": 4}}
    run(tmp_path / "run", {"model": model, "resume": str(tmp_path / "run")})
    file = on_folder[1] / "model.safetensors"
    kept, weights = file.read_bytes(), load_file(file)
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    try:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
        with pytest.raises(UserError, match="were trained on another model"):
            run(tmp_path / "run", {"model": model, "resume": str(tmp_path / "run")})
        with pytest.raises(UserError, match="were trained on another model"):
            export(on_folder[0], tmp_path / "out", say=print)
    finally:
        file.write_bytes(kept)


def test_adapters_of_a_run_bring_their_settings(on_folder, tmp_path) -> None:
    base = {"path": str(on_folder[1])}
    for place in (on_folder[0], on_folder[0] / "checkpoints" / "step-000004"):
        changes = {"model": {**base, "lora": {"adapter": str(place)}}}
        config = with_runs_as_models(settings(tmp_path / "b", changes), print)
        assert config.model.lora is not None
        assert (config.model.lora.rank, config.model.lora.alpha) == (4, 32)
        assert len(adapted_layers(load_initial(config, CPU).model)) == 14
    with pytest.raises(UserError, match=r"`model.lora.alpha` is 64.0, and that of the adapter in .* is 32.0"):
        run(tmp_path / "c", {"model": {**base, "lora": {"adapter": str(on_folder[0]), "alpha": 64}}})


def test_checkpoints_of_the_other_kind_are_named(on_folder, tmp_path) -> None:
    run(tmp_path / "full", {"model.lora": None, "train.steps": 2})
    full, mine = (str(folder / "checkpoints" / "step-000002") for folder in (tmp_path / "full", on_folder[0]))
    with pytest.raises(UserError, match="is of a run that trained all weights: name it in"):
        with_runs_as_models(settings(tmp_path / "b", {"model.lora": {"adapter": full}}), print)
    with pytest.raises(UserError, match=r"trained adapters \(`model.lora`\): name it in `model.path`"):
        load_initial(settings(tmp_path / "b", {"model.lora": None, "model.weights": mine}), CPU)


@pytest.mark.slow
def test_adapters_on_top_of_a_run(tmp_path) -> None:
    run(tmp_path / "full", {"model.lora": None, "train.steps": 2})
    changes = {"model": {"path": str(tmp_path / "full"), "lora": {"rank": 4}}}
    model = run(tmp_path / "run", changes)
    base = read_model(list_checkpoints(tmp_path / "full" / "checkpoints")[-1])[0].state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())
    said: list[str] = []
    export(tmp_path / "run", tmp_path / "adapter", say=said.append)
    assert "base is not a model of its own" in said[-1]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_a_run_with_adapters_is_served(on_folder) -> None:
    loaded, _ = load_served(str(on_folder[0]), ServeConfig(device="cpu"), print)
    assert len(adapted_layers(loaded.model)) == 14


def test_the_reference_is_the_base_to_the_bit_and_no_holding(tmp_path) -> None:
    changes = {"loss.kl": {"coefficient": 0.1}, "checkpoint": None}
    data = [Datum.completion([1, 2, 3], [4, 5, 6, 7]), Datum.completion([3], [2, 2])]
    with Worker(settings(tmp_path / "a", changes)) as worker:
        assert "reference" not in worker.residency.plan.specs
        for layer in adapted_layers(worker.policy.model).values():
            layer.lora_B.data.normal_()
        with worker.phase("logprob"):
            worker.logprobs(data, "reference", model="reference")
            worker.logprobs(data, "policy")
    with Worker(settings(tmp_path / "b", {**changes, "model.lora": None})) as worker:
        assert "reference" in worker.residency.plan.specs
        with worker.phase("logprob"):
            worker.logprobs(data, "own", model="reference")
    for datum in data:
        assert torch.equal(datum.values["reference"], datum.values["own"])
        assert not torch.equal(datum.values["policy"], datum.values["own"])


def test_the_penalty_of_the_first_step_is_zero(tmp_path) -> None:
    run(tmp_path / "run", {"loss.kl": {"coefficient": 0.1}, "train.steps": 2})
    first, second = (line for line in lines(tmp_path / "run") if line["step"] > 0)
    assert first["kl"] == 0
    assert second["kl"] > 0


def test_a_run_goes_on_from_another_runs_adapters(whole, tmp_path) -> None:
    folder, model = whole
    second = run(tmp_path / "b", {"model": {"path": str(folder)}, "optimizer.lr": 1e-30, "train.steps": 1})
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in second.state_dict().items())
    with pytest.raises(UserError, match="is a run with adapters, which are trained further: remove"):
        run(tmp_path / "c", {"model": {"path": str(folder), "lora": {"rank": 8}}})


def test_export_writes_the_adapter_or_the_merged_model(whole, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    folder, model = whole
    tokens = torch.tensor([[1, 5, 2, 7]])
    export(folder, tmp_path / "adapter", say=print)
    assert sorted(path.name for path in (tmp_path / "adapter").glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    said: list[str] = []
    export(folder, tmp_path / "merged", say=said.append, merge=True)
    assert "rounded away 0.00%" in said[0]
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged_model(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    read = read_model(list_checkpoints(folder / "checkpoints")[-1])[0]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in read.state_dict().items())


def test_merging_needs_adapters(tmp_path) -> None:
    run(tmp_path / "run", {"model.lora": None, "train.steps": 1})
    with pytest.raises(UserError, match="has no adapters"):
        export(tmp_path / "run", tmp_path / "out", say=print, merge=True)


@pytest.mark.parametrize("place", ["device", pytest.param("streamed", marks=pytest.mark.slow), "cpu"])
def test_every_optimizer_trains_adapters_alike(whole, tmp_path, place: str) -> None:
    """The CPU's kernels round as the others do within float32."""
    model = run(tmp_path / "run", {"optimizer.place": place})
    for name, value in whole[1].state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(found, value) if place != "cpu" else torch.allclose(found, value, atol=2e-3, rtol=0.02)


def test_the_table_has_the_bytes_of_base_and_adapters(tmp_path) -> None:
    config = settings(tmp_path / "run", {"checkpoint": None})
    shape = model_shape(config)
    with Worker(config) as worker:
        sizes = {
            name: sum(storage.nbytes() for storage in worker.residency._holdings[name].storages())
            for name in ("weights", "base")
        }
    assert sizes["weights"] == 4 * shape.adapter_parameters
    assert sizes["base"] == 4 * shape.parameters


def test_the_huggingface_engine_samples_with_adapters(tmp_path) -> None:
    run(tmp_path / "run", {"rollout.engine": "huggingface", "train.steps": 2})
    assert max(line["mismatch_max"] for line in lines(tmp_path / "run") if line["step"] > 0) < 1e-4


@pytest.mark.parametrize("preset", ["recompute", "offload", "balanced"])
def test_gradients_are_the_same_whatever_is_kept(tmp_path, preset: str) -> None:
    """Also of the first block, whose input has no gradient."""
    data = [Datum.completion([1, 2, 3], [4, 5, 6, 7]), Datum.completion([3], [2, 2])]
    found = []
    for name in ("keep", preset):
        with Worker(settings(tmp_path / name, {"memory.activations.preset": name, "checkpoint": None})) as worker:
            torch.manual_seed(0)
            for layer in adapted_layers(worker.policy.model).values():
                layer.lora_B.data.normal_()
            with worker.phase("train"):
                worker.forward_backward(data, lambda inputs: inputs.logprobs.sum())
            named = worker.policy.model.named_parameters()
            found.append({one: parameter.grad.clone() for one, parameter in named if parameter.requires_grad})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(float(grad.abs().max()) > 0 for grad in found[0].values())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["new", "from an adapter"])
def test_the_reference_is_where_the_run_began(whole, tmp_path, adapter: bool) -> None:
    """Of a run that starts from an adapter it is a copy of that, of a few bytes."""
    start = {"model": {"path": str(whole[0])}} if adapter else {}
    changes = {**start, "loss.kl": {"coefficient": 0.1}, "train.steps": 3, "checkpoint": {"every": 1, "keep": 9}}
    straight = run(tmp_path / "a", changes).state_dict()
    assert lines(tmp_path / "a")[-3]["kl"] == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "b" / "checkpoints" / f"step-{step:06}")
    resumed = run(tmp_path / "b", {**changes, "run.folder": str(tmp_path / "b"), "resume": str(tmp_path / "b")})
    assert all(torch.equal(value, straight[name]) for name, value in resumed.state_dict().items())


def test_dpo_and_sft_train_adapters(tmp_path) -> None:
    lora = {"model.lora": {"rank": 4}, "optimizer.lr": 1e-2, "train.steps": 4}
    for name, rows in (("dpo", preferences()), ("sft", digits())):
        file = write_rows(tmp_path / f"{name}.jsonl", rows)
        config = config_of(name, {"data": {"train": file, **DATA}, "run.folder": str(tmp_path / name), **lora})
        with Report(config, "test") as report:
            model = train(config, report).model
        found = [line["loss"] for line in lines(tmp_path / name) if line["step"] > 0]
        if name == "dpo":
            assert found[0] == pytest.approx(math.log(2))
        assert found[-1] < found[0]
        assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())


def test_it_resumes_without_the_adapter_that_it_started_from(on_folder, tmp_path) -> None:
    export(on_folder[0], tmp_path / "adapter", say=print)
    changes = {"model": {"path": str(on_folder[1]), "lora": {"adapter": str(tmp_path / "adapter")}}}
    straight = run(tmp_path / "run", changes).state_dict()
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config = with_runs_as_models(GrpoConfig.model_validate({**tree, "resume": str(tmp_path / "run")}), print)
    with Report(config, "test", resumed=find_checkpoint(config, print)) as report:
        again = train(config, report).model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in straight.items())


def test_distillation_trains_adapters_towards_a_teacher_with_adapters(whole, tmp_path) -> None:
    changes = {
        "task": TINY["task"],
        "rollout": TINY["rollout"],
        "model.lora": {"rank": 4},
        "teacher": {"path": str(whole[0])},
        "train.steps": 4,
        "optimizer.lr": 1e-2,
        "run.folder": str(tmp_path / "run"),
    }
    config = with_runs_as_models(config_of("distill", changes), print)
    with Report(config, "test") as report:
        model = train(config, report).model
    found = [line["loss"] for line in lines(tmp_path / "run") if line["step"] > 0]
    assert found[-1] < found[0]
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())
    with pytest.raises(ValueError, match=r"needs `teacher\.lora\.adapter`"):
        config_of("distill", {**changes, "teacher": {**TINY["model"], "lora": {"rank": 4}}})
