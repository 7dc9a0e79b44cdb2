"""Blocks of a frozen base that are streamed from the host, on a GPU: the same bits, and two blocks at once."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import TINY, merged
from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.model.load import load_model
from ebbtide.model.lora import adapted_layers
from ebbtide.report.report import Report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDE = {
    "model.scratch.hidden": 512,
    "model.scratch.mlp": 1024,
    "model.scratch.layers": 8,
    "model.lora": {"rank": 8},
    "device": "cuda",
    "checkpoint": None,
    "train.steps": 4,
    "train.microbatch_tokens": 64,
    "memory.plan": "manual",
}


@pytest.mark.parametrize(("base", "embeddings"), [(None, False), ("float8", False), ("int4", False), ("int4", True)])
def test_a_run_has_the_same_bits(tmp_path, base, embeddings) -> None:
    torch.use_deterministic_algorithms(True)
    found = []
    try:
        for streams in (False, True):
            folder = tmp_path / str(streams)
            changes = {**WIDE, "model.base": base, "memory.stream_base": streams, "run.folder": str(folder)}
            changes["model.base_embeddings"] = embeddings
            config = GrpoConfig.model_validate(merged(TINY, changes))
            with Report(config, "test") as report:
                model = train(config, report).model
            layers = adapted_layers(model).values()
            found.append([one.detach().cpu() for layer in layers for one in (layer.lora_A, layer.lora_B)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "True" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["moved_gib"] > 0 for line in lines if line["step"] > 1)


def test_decode_graphs_are_captured_once(tmp_path, monkeypatch) -> None:
    """Blocks come back to the addresses that the graphs of the step before read, after a save too."""
    from ebbtide.rollout.paged.decode_graph import DecodeGraph  # It needs triton.

    captured, capture = [], DecodeGraph.capture

    def noted(graph, pool) -> None:
        steps = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
        if steps:  # The model was loaded to other addresses than those it came back to first.
            captured.append((graph.inputs.rows, graph._metadata.samples, graph._sample is None))
        capture(graph, pool)

    monkeypatch.setattr(DecodeGraph, "capture", noted)
    large = {**WIDE, "model.scratch.hidden": 1024, "model.scratch.mlp": 4096, "model.lora": None}
    loaded = load_model(GrpoConfig.model_validate(merged(TINY, large)), torch.device("cpu"))
    loaded.model.save_pretrained(tmp_path / "base")
    loaded.tokenizer.save_pretrained(tmp_path / "base")
    changes = {name: value for name, value in WIDE.items() if not name.startswith("model.")}
    changes |= {"model": {"path": str(tmp_path / "base"), "lora": {"rank": 8}}, "train.steps": 8}
    changes |= {"checkpoint": {"every": 4}, "memory.stream_base": True, "run.folder": str(tmp_path / "run")}
    config = GrpoConfig.model_validate(merged(TINY, changes))
    with Report(config, "test") as report:
        train(config, report)
    assert captured
    assert len(captured) == len(set(captured))
