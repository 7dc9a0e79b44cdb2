"""On a GPU: the budget is enforced, what a block saves is what was foretold, and memory that runs out leaves its
history."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import FAMILIES, family
from ebbtide.algorithms.loop import train
from ebbtide.errors import UserError
from ebbtide.memory.device_budget import enforce_budget, free_bytes
from ebbtide.memory.residency import Residency
from ebbtide.model.load import blocks_of, load_model
from ebbtide.model.shape import find_shape
from ebbtide.planner.holdings import plan_holdings
from ebbtide.policy import block_activations
from ebbtide.policy.activation_costs import ActivationPolicy, locally_recomputable, saved_bytes
from ebbtide.policy.activation_plan import PlacedBlocks, measure_saved_bytes
from ebbtide.policy.policy import Policy
from ebbtide.report.report import Report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GIB = 2**30
LONG = {"device": "cuda", "model.scratch.context": 1024, "rollout.max_new_tokens": 500, "train.microbatch_tokens": 512}


@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_those_that_autograd_saves(tiny, name, again) -> None:
    config = tiny(family(name) | LONG)
    policy, shape = Policy(load_model(config), config), find_shape(config.model)
    blocks = blocks_of(policy.model)
    names = locally_recomputable(shape) if again else frozenset()
    found = measure_saved_bytes(
        PlacedBlocks(blocks),
        block_activations.ActivationChoice(recompute=names, local=block_activations.locally_recomputable(blocks[0])),
        policy._probe,
    )
    foretold = saved_bytes(shape, 2, ActivationPolicy(recompute=names))
    slack = 4 * (shape.heads + shape.kv_heads) + 1  # roots are counted with a norm or not at all
    assert sum(found.values()) == pytest.approx(sum(foretold.values()), rel=0.02, abs=3 * slack)
    for module in {*found, *foretold} - {"moe_act", "expert_fc1", "moe_router"}:
        assert foretold.get(module, 0) == pytest.approx(found.get(module, 0), abs=slack), module


def test_a_run_keeps_to_its_budget_and_says_what_was_predicted(tiny, tmp_path, capsys) -> None:
    config = tiny({"device": "cuda", "checkpoint": None, "memory.budget_gib": 1.0, "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        train(config, report)
        report.summarize_run("done")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["reserved_gib/train"] for line in lines) <= 1.0
    assert (tmp_path / "run" / "plan.json").exists()
    assert "predicted for the lengths it had" in capsys.readouterr().out
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_memory_that_runs_out_leaves_the_plans_view_and_a_history(tiny, tmp_path) -> None:
    config, device = tiny(), torch.device("cuda", torch.cuda.current_device())
    with enforce_budget(device, 2.0), Residency(plan_holdings(config), device) as residency:
        assert free_bytes(device) <= 2 * GIB
        residency.on_oom(lambda phase: f"the plan foresaw {phase}")
        residency.record_history(tmp_path / "history.pickle")
        with pytest.raises(UserError, match="the plan foresaw train"), residency.phase("train"):
            torch.empty(3 * GIB, dtype=torch.uint8, device=device)
    assert (tmp_path / "history.pickle").stat().st_size > 0


def test_more_than_the_device_has_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(UserError, match="more than the"), enforce_budget(device, 1e6):
        pass
