"""Runs with adapters beside a quantized base: they learn, resume to the bit, are exported and served."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from ebbtide.checkpoint.export import export, read_model
from ebbtide.checkpoint.index import read_index
from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError
from ebbtide.launch.serve import load_served
from ebbtide.model.load import load_model
from ebbtide.model.lora import adapted_layers
from ebbtide.model.quantized_layers import layer_matrix, quantized_of
from test_lora_runs import CPU, lines, run, save_base, settings

TOKENS = torch.tensor([[1, 5, 2, 7, 3, 3, 9]])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("model"))


def same_bits(ours: dict, theirs: dict) -> bool:
    """Whether all tensors have the same bytes; some types have no comparison."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(one.view(torch.uint8), theirs[name].view(torch.uint8)) for name, one in ours.items()
    )


def changes(folder, kind: str) -> dict:
    return {"model": {"path": str(folder), "lora": {"rank": 4}, "base": kind}}


@pytest.fixture(scope="module", params=["float8", "int4"])
def quantized(request, model_folder, tmp_path_factory):
    """(the folder of a run of four steps, its model, its settings)."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    given = changes(model_folder, request.param)
    return folder, run(folder, given), given


def test_the_base_stays_as_it_was_and_the_sampler_computes_with_it(quantized) -> None:
    folder, model, given = quantized
    base = load_initial(settings(folder, given), CPU).model.state_dict()
    found = model.state_dict()
    assert same_bits(*({name: one for name, one in some.items() if ".lora_" not in name} for some in (found, base)))
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(model).values())
    assert max(line["mismatch_max"] for line in lines(folder) if line["step"] > 0) < 1e-5


def test_it_resumes_to_the_bit(quantized, tmp_path) -> None:
    folder, model, given = quantized
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "checkpoints" / "step-000004")
    resumed = run(again, {"resume": str(again), **given}).state_dict()
    assert all(
        torch.equal(one.view(torch.uint8), resumed[name].view(torch.uint8)) for name, one in model.state_dict().items()
    )


def test_another_base_is_refused(quantized, tmp_path) -> None:
    folder, _, given = quantized
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    other = {**given["model"], "base": "int4" if given["model"]["base"] == "float8" else "float8"}
    with pytest.raises(UserError, match=r"`model.base` was .* and is"):
        run(again, {"resume": str(again), "model": other, "train.steps": 6})


def test_a_checkpoint_has_the_adapters_alone(quantized) -> None:
    saved = list_checkpoints(quantized[0] / "checkpoints")[-1]
    names = [key for key in read_index(CheckpointFiles(saved.path)) if key.startswith("model.")]
    assert len(names) == 28
    assert all(".lora_" in name for name in names)


@torch.no_grad()
def test_export_merges_into_the_numbers_that_the_run_computed_with(quantized, tmp_path) -> None:
    folder, model, _ = quantized
    wanted = {
        name: layer_matrix(layer).float() + layer.scale * (layer.lora_B @ layer.lora_A)
        for name, layer in adapted_layers(model).items()
    }
    said: list[str] = []
    export(folder, tmp_path / "merged", say=said.append, merge=True)
    assert "merged the adapters" in said[-1]
    merged = load_model(settings(folder, {"model": {"path": str(tmp_path / "merged")}, "model.lora": None}), CPU).model
    for name, weight in wanted.items():
        torch.testing.assert_close(merged.get_submodule(name).weight, weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, atol=1e-4, rtol=1e-4)
    export(folder, tmp_path / "adapter", say=said.append)
    assert "was trained beside weights in" in said[-1]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_it_is_served(quantized) -> None:
    loaded, _ = load_served(str(quantized[0]), ServeConfig(device="cpu"), lambda text: None)
    assert all(quantized_of(layer) is not None for layer in adapted_layers(loaded.model).values())
    assert torch.equal(loaded.model(TOKENS).logits, quantized[1](TOKENS).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "embeddings"), [("float8", False), ("int4", True)])
def test_a_new_models_codes_are_saved_and_resumed(kind, embeddings, tmp_path, monkeypatch) -> None:
    folder, given = tmp_path / "run", {"model.base": kind, "model.base_embeddings": embeddings}
    model = run(folder, given)
    saved = list_checkpoints(folder / "checkpoints")
    shutil.rmtree(saved[-1].path)
    resumed = run(folder, {**given, "resume": str(folder)}).state_dict()
    assert all(
        torch.equal(one.view(torch.uint8), resumed[name].view(torch.uint8)) for name, one in model.state_dict().items()
    )
    found = read_model(list_checkpoints(folder / "checkpoints")[-1])[0].state_dict()
    assert all(
        torch.equal(one.view(torch.uint8), found[name].view(torch.uint8)) for name, one in model.state_dict().items()
    )
    other = "int4" if kind == "float8" else "float8"
    monkeypatch.setattr("ebbtide.model.quantized_layers.layer_kind", lambda *of_layer: other)
    with pytest.raises(UserError, match="other codes than this run makes"):
        run(folder, {**given, "resume": str(folder), "train.steps": 6})
    with pytest.raises(UserError, match="other codes than this run makes"):
        read_model(list_checkpoints(folder / "checkpoints")[-1])


@pytest.mark.parametrize("kind", ["float8", "int4"])
def test_a_model_is_served_with_a_quantized_base(kind, model_folder) -> None:
    loaded, _ = load_served(str(model_folder), ServeConfig(device="cpu", base=kind), lambda text: None)
    wanted = load_initial(settings(model_folder, changes(model_folder, kind)), CPU).model
    assert torch.equal(loaded.model(TOKENS).logits, wanted(TOKENS).logits)


def test_what_is_asked_of_embeddings_needs_a_base() -> None:
    with pytest.raises(ValueError, match=r"`base_embeddings` quantizes what `base` leaves"):
        ServeConfig(base_embeddings=True)


def test_a_run_with_adapters_has_a_base_of_its_own(quantized) -> None:
    with pytest.raises(UserError, match=r"is a run with adapters, whose own `model.base` counts: remove `base`$"):
        load_served(str(quantized[0]), ServeConfig(device="cpu", base="int4"), lambda text: None)


def test_a_run_of_all_weights_is_served_with_a_quantized_base(tmp_path) -> None:
    run(tmp_path / "run", {"model.lora": None, "train.steps": 2})
    loaded, _ = load_served(str(tmp_path / "run"), ServeConfig(device="cpu", base="int4"), lambda text: None)
    assert any(quantized_of(layer) is not None for layer in loaded.model.modules())


def test_what_does_not_go_with_the_base_of_a_run_is_refused(quantized) -> None:
    config = settings(quantized[0], {"model": {"path": str(quantized[0])}, "rollout.engine": "vllm"})
    with pytest.raises(UserError, match=r"vllm` cannot compute with `model.base"):
        with_runs_as_models(config, print)


def test_scales_keep_their_type_whatever_a_run_is_served_in(quantized) -> None:
    loaded, _ = load_served(str(quantized[0]), ServeConfig(device="cpu", dtype="float32"), lambda text: None)
    found = [quantized_of(layer) for layer in adapted_layers(loaded.model).values()]
    assert {one.scale.dtype for one in found} <= {torch.bfloat16, torch.uint8}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_with_quantized_embeddings(tied, tmp_path) -> None:
    """It learns beside them, resumes to the bit, is served in either type, and is merged."""
    base, folder = save_base(tmp_path / "model", tied=tied), tmp_path / "run"
    given = changes(base, "int4")
    given["model"]["base_embeddings"] = True
    model = run(folder, given)
    assert max(line["mismatch_max"] for line in lines(folder) if line["step"] > 0) < 1e-5
    shutil.rmtree(list_checkpoints(folder / "checkpoints")[-1].path)
    assert same_bits(run(folder, {"resume": str(folder), **given}).state_dict(), model.state_dict())

    other = {**given["model"], "base_embeddings": False}
    with pytest.raises(UserError, match=r"`model.base_embeddings` was .* and is"):
        run(folder, {"resume": str(folder), "model": other, "train.steps": 6})

    wanted = model(TOKENS).logits
    for dtype in ("float32", "bfloat16"):
        loaded, _ = load_served(str(folder), ServeConfig(device="cpu", dtype=dtype), lambda text: None)
        found = loaded.model(TOKENS).logits
        assert found.dtype == loaded.model.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found.float(), wanted, atol=0 if dtype == "float32" else 0.05, rtol=0)
    export(folder, tmp_path / "merged", say=lambda text: None, merge=True)
    merged = load_model(settings(folder, {"model": {"path": str(tmp_path / "merged")}, "model.lora": None}), CPU).model
    assert merged.config.tie_word_embeddings == tied
    torch.testing.assert_close(merged(TOKENS).logits, wanted, atol=1e-4, rtol=1e-4)
    served, _ = load_served(str(base), ServeConfig(device="cpu", base="int4", base_embeddings=True), lambda text: None)
    assert torch.equal(served.model(TOKENS).logits, load_initial(settings(folder, given), CPU).model(TOKENS).logits)
