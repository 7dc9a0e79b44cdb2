"""Plans for a budget: they fit what they claim, cost no less as it shrinks, and leave alone what is set by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.config import load
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.planner_keys import GROUPS, free_groups, keep_planned_settings, with_changes
from ebbtide.config.planner_keys import settings_diff as as_settings
from ebbtide.model.shape import find_shape
from ebbtide.model.workload import max_workload
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import COPIES, host_bytes
from ebbtide.planner.predict import Predictor
from ebbtide.planner.prediction import Prediction
from ebbtide.planner.render import explain_misfit, render_plan, to_arguments
from ebbtide.planner.search import PlanResult, PlanSearch, usable_gib
from ebbtide.system.machine import machine_for
from ebbtide.system.units import GIB

BASE: dict[str, Any] = {
    "model": {
        "scratch": {
            "layers": 28,
            "hidden": 2048,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "mlp": 6144,
            "context": 40960,
            "vocabulary": 151936,
        }
    },
    "task": {"builtin": {"name": "copy"}},
    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_prompt_tokens": 126, "max_new_tokens": 256},
    "checkpoint": None,
}
MACHINE = machine_for("h200", None, 128, None)


def config_with(**sections: Any) -> GrpoConfig:
    return GrpoConfig.model_validate({**BASE, **sections})


def chosen_for(budget: float, config: GrpoConfig | None = None, host: float = 128.0) -> PlanResult:
    config = config or config_with()
    return PlanSearch(Predictor(find_shape(config.model), MACHINE), max_workload(config), budget, host).choose(config)


def under(prediction: Prediction, budget: float) -> bool:
    """With what is left to the allocator; but a cache that could use more takes of that as well, as it does in a
    run."""
    limits = {
        phase: budget if phase in ("generate", "evaluate") and not prediction.cache_is_full_size else usable_gib(budget)
        for phase in prediction.phases
    }
    return all(one.peak <= limits[phase] * GIB for phase, one in prediction.phases.items())


def test_where_all_fits_nothing_is_changed() -> None:
    found = chosen_for(139.0)
    assert found.fits
    assert not found.candidate.changes
    assert not found.reasons


SMALL = {
    "model": {
        "scratch": {
            "architecture": "llama",
            "layers": 30,
            "hidden": 576,
            "heads": 9,
            "kv_heads": 3,
            "head_dim": 64,
            "mlp": 1536,
            "context": 2048,
            "vocabulary": 49152,
        }
    },
    "rollout": {"prompts_per_step": 32, "group_size": 16, "max_prompt_tokens": 52, "max_new_tokens": 8},
}


def test_a_small_model_has_larger_micro_batches_where_they_fit() -> None:
    found = chosen_for(139.0, config_with(**SMALL))
    assert dict(found.candidate.changes) == {"train.microbatch_tokens": 32768}  # the 30,720 tokens of a step, at once
    (reason,) = found.reasons
    assert reason.seconds is not None
    assert reason.seconds < 0
    assert not chosen_for(139.0, config_with(**SMALL, train={"microbatch_tokens": 16384})).candidate.changes
    assert not chosen_for(139.0, config_with(**SMALL, memory={"plan": "manual"})).candidate.changes
    assert chosen_for(6.0, config_with(**SMALL)).candidate.config.train.microbatch_tokens == 16384


LONG = {
    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_prompt_tokens": 512, "max_new_tokens": 4096},
    "train": {},
}


@pytest.mark.parametrize("sections", [{}, LONG], ids=["short", "long"])
def test_a_smaller_budget_never_promises_a_faster_step(sections: dict[str, Any]) -> None:
    seconds = []
    for budget in (120, 70, 60, 50, 40, 36, 32, 24, 20, 16, 12, 10, 8):
        found = chosen_for(budget, config_with(**sections))
        assert found.fits
        assert under(found.candidate.prediction, budget)
        seconds.append(found.candidate.prediction.seconds)
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] > 1.3 * seconds[0]


def test_every_change_has_its_reason() -> None:
    found = chosen_for(16)
    groups = [keys for keys in GROUPS.values() if set(keys) & set(found.candidate.changes)]
    assert len(found.reasons) == len(groups) >= 2
    assert all("GiB" in reason.why or "cache" in reason.why or "faster" in reason.why for reason in found.reasons)
    assert any("optimizer" in setting or "memory" in setting for setting in found.reasons[0].settings)


def test_the_least_is_the_least() -> None:
    below = chosen_for(4.0)
    assert not below.fits
    assert below.nearest is None
    assert below.min_gib is not None
    assert chosen_for(1.01 * below.min_gib).fits
    assert not chosen_for(0.98 * below.min_gib).fits


@pytest.mark.parametrize(
    "host", [pytest.param(8.0, marks=pytest.mark.slow), 16.0, pytest.param(24.0, marks=pytest.mark.slow)]
)
def test_the_least_counts_only_what_the_host_has_room_for(host: float) -> None:
    """With the optimizer on the host it would be less."""
    below = chosen_for(7, host=host)
    assert not below.fits
    assert below.min_gib is not None
    assert chosen_for(1.01 * below.min_gib, host=host).fits
    assert not chosen_for(0.98 * below.min_gib, host=host).fits


@pytest.mark.parametrize(
    ("by_hand", "kept"),
    [
        (
            {"optimizer": {"place": "device"}},
            lambda c: c.optimizer.place == "device" and c.optimizer.cpu_fraction is None,
        ),
        (
            {"optimizer": {"cpu_fraction": 0.25}},
            lambda c: c.optimizer.cpu_fraction == 0.25 and c.optimizer.place == "device",
        ),
        (
            {"memory": {"activations": {"preset": "keep"}}},
            lambda c: c.memory.activations.preset == "keep" and not c.memory.activations.recompute,
        ),
        ({"train": {"microbatch_tokens": 6000}}, lambda c: c.train.microbatch_tokens == 6000),
        ({"memory": {"preset": "keep"}}, lambda c: c.memory.preset == "keep" and c.memory.offload.generate is None),
        ({"train": {"head_chunk_tokens": 2000}}, lambda c: c.train.head_chunk_tokens == 2000),
    ],
)
def test_what_is_set_by_hand_stays(by_hand: dict[str, Any], kept: Any) -> None:
    found = chosen_for(30, config_with(**by_hand))
    assert found.fits
    assert found.candidate.changes  # the rest was planned
    assert kept(found.candidate.config)


def test_manual_changes_nothing_and_names_the_nearest() -> None:
    found = chosen_for(40, config_with(memory={"plan": "manual"}))
    assert not found.fits
    assert not found.candidate.changes
    assert found.nearest is not None
    assert len({key.split(".")[0] for key in found.nearest.changes}) == 1  # one change is enough
    assert chosen_for(40, with_changes(config_with(memory={"plan": "manual"}), found.nearest.changes)).fits


def test_host_memory_is_a_limit_too() -> None:
    assert chosen_for(16, host=128).candidate.prediction.host > 8 * GIB
    assert not chosen_for(16, host=8).fits
    held = chosen_for(16, config_with(optimizer={"place": "cpu"}, memory={"host_budget_gib": 1.0}))
    assert held.bottleneck == "host" or held.bottleneck == "device"
    roomy = chosen_for(120, config_with(optimizer={"place": "cpu"}, memory={"host_budget_gib": 1.0}))
    assert roomy.bottleneck == "host"
    assert "`memory.host_budget_gib` = 1" in explain_misfit(
        roomy, config_with(optimizer={"place": "cpu"}, memory={"host_budget_gib": 1.0}), MACHINE
    )


@pytest.mark.parametrize(
    "by_hand",
    [
        {},
        {"optimizer": {"cpu_fraction": 0.3}},
        {"memory": {"activations": {"recompute": ["mlp_norm"], "keep_last": 2}}},
    ],
)
def test_settings_turn_what_was_asked_into_what_was_chosen(by_hand: dict[str, Any], tmp_path: Path) -> None:
    asked = config_with(**by_hand)
    found = chosen_for(14, asked)
    best = found.candidate if found.fits else found.nearest
    assert best is not None
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump({**BASE, **by_hand}))
    again = load(str(tmp_path / "asked.yaml"), as_settings(asked, best.config))
    assert (again.optimizer, again.memory, again.train) == (
        best.config.optimizer,
        best.config.memory,
        best.config.train,
    )


def test_a_run_that_goes_on_keeps_what_was_chosen() -> None:
    chosen = chosen_for(16).candidate.config
    resumed = keep_planned_settings(config_with(), chosen.model_dump(mode="json"))
    assert (resumed.optimizer.place, resumed.memory.activations) == (chosen.optimizer.place, chosen.memory.activations)
    assert not free_groups(resumed)
    by_hand = keep_planned_settings(config_with(train={"microbatch_tokens": 5000}), chosen.model_dump(mode="json"))
    assert by_hand.train.microbatch_tokens == 5000


def test_more_host_memory_is_said_to_be_what_lacks() -> None:
    config = config_with()
    found = chosen_for(7, config, host=8)
    said = explain_misfit(found, config, machine_for("h200", None, 8, None))
    rest = said.partition(". With 8 GiB of host memory the minimum is ")[2]
    wanted, changes = rest.partition(" GiB of device memory. With ")[2].split(
        " GiB of host memory these settings fit: "
    )
    again = with_changes(config, found.with_more_host.changes)
    assert changes == " ".join(as_settings(config, again))
    assert chosen_for(7, again, host=float(wanted)).fits
    assert not chosen_for(7, again, host=0.98 * float(wanted)).fits
    assert chosen_for(4.0).with_more_host is None


def test_what_a_run_pins_for_saves_is_host_memory_where_there_is_room() -> None:
    config = config_with(checkpoint={})
    machine = machine_for("h200", None, 128, None)
    with_copies = Predictor(find_shape(config.model), machine).predict(config, max_workload(config), 139 * GIB)
    needs = host_bytes(
        config_with(checkpoint={}, device="cpu", model={**BASE["model"], "dtype": "bfloat16"}),
        plan_holdings(config),
    )
    assert with_copies.host == needs[COPIES]
    assert with_copies.missing_save_bytes == 0
    short = Predictor(find_shape(config.model), replace(machine, host_gib=20)).predict(
        config, max_workload(config), 139 * GIB
    )
    assert (short.host, short.missing_save_bytes) == (0, needs[COPIES])
    away = config_with(checkpoint={}, memory={"offload": {"save": ["moments"]}})
    less = Predictor(find_shape(config.model), machine).predict(away, max_workload(away), 139 * GIB)
    assert less.host == needs[COPIES]  # what is away is read there: it is a part of the host's either way


def test_what_crosses_the_link_is_counted() -> None:
    def moved(phase: str, **sections: Any) -> int:
        return (
            chosen_for(139, config_with(memory={"plan": "manual"}, **sections)).candidate.prediction.phases[phase].moved
        )

    parameters = find_shape(config_with().model).parameters
    assert moved("step") == moved("train") == 0
    assert moved("step", optimizer={"place": "streamed"}) == 20 * parameters
    assert moved("step", optimizer={"place": "cpu"}) == 2 * parameters
    assert moved("train", optimizer={"place": "cpu"}) == 3 * 2 * parameters  # of three micro-batches
    assert moved("step", optimizer={"place": "cpu", "overlap": False}) == 4 * parameters
    offloaded = chosen_for(
        139, config_with(memory={"plan": "manual", "activations": {"preset": "offload"}})
    ).candidate.prediction
    assert (
        offloaded.phases["train"].moved == 2 * 27 * 2 * 2048 * 128 * 381
    )  # inputs of blocks but the last, out and in; a sample's last token is not read


def test_other_engines_are_counted_as_they_are() -> None:
    tokens = 128 * (126 + 256)
    cache = tokens * 2 * 28 * 1024 * 2
    hugging = chosen_for(139, config_with(rollout={**BASE["rollout"], "engine": "huggingface"})).candidate.prediction
    assert hugging.phases["generate"].device["kv_cache"] == cache
    assert hugging.blocks is None
    small = chosen_for(7, config_with(rollout={**BASE["rollout"], "engine": "huggingface"}))
    assert small.min_gib is not None
    assert small.min_gib > 7  # its cache is as large as it is
    vllm = config_with(rollout={**BASE["rollout"], "engine": "vllm", "vllm": {"sleep_level": 0, "memory_share": 0.25}})
    phases = chosen_for(139, vllm).candidate.prediction.phases
    assert (
        phases["train"].device["kv_cache"]
        == phases["generate"].device["kv_cache"]
        == int(0.25 * MACHINE.device_gib * GIB)
    )


def test_a_cache_that_is_kept_is_there_in_every_phase_it_is_not_away_in() -> None:
    rollout = {**BASE["rollout"], "partial": {"extra_prompts": 4, "kv_cache": "keep"}}
    block = 64 * 2 * 28 * 1024 * 2
    phases = chosen_for(139, config_with(rollout=rollout)).candidate.prediction.phases
    assert phases["train"].device["kv_cache"] == 4 * (2 + 8 * 4) * block
    away = chosen_for(139, config_with(rollout=rollout, memory={"preset": "lean"})).candidate.prediction.phases
    assert "kv_cache" not in away["train"].device
    assert away["train"].host > phases["train"].host


@settings(max_examples=40, deadline=None)
@given(
    budget=st.floats(3, 140),
    prompts=st.integers(1, 64),
    samples=st.integers(2, 16),
    prompt=st.integers(1, 2000),
    new=st.integers(1, 4000),
    minibatches=st.integers(1, 2),
    kl=st.booleans(),
)
def test_whatever_is_asked_what_fits_is_under_the_budget(
    budget: float, prompts: int, samples: int, prompt: int, new: int, minibatches: int, kl: bool
) -> None:
    config = config_with(
        rollout={
            "prompts_per_step": prompts,
            "group_size": samples,
            "max_prompt_tokens": prompt,
            "max_new_tokens": new,
        },
        train={"minibatches": minibatches},
        loss={"kl": {} if kl else None},
    )
    found = chosen_for(budget, config)
    if found.fits:
        assert under(found.candidate.prediction, budget)
        assert found.candidate.prediction.generation.concurrent >= 1
        assert all(phase.seconds >= phase.exposed >= 0 for phase in found.candidate.prediction.phases.values())
    else:
        assert found.nearest is None or found.min_gib is None


def test_balanced_runs_as_it_was_foreseen() -> None:
    found = chosen_for(139, config_with(memory={"activations": {"preset": "balanced"}}))
    now = found.candidate.config.memory.activations
    assert not found.candidate.changes
    assert now.preset == "keep"
    assert frozenset(now.offload or []) == found.candidate.prediction.activations.offload
    assert frozenset(now.recompute or []) == found.candidate.prediction.activations.recompute
    by_hand = chosen_for(139, config_with(memory={"plan": "manual", "activations": {"preset": "balanced"}}))
    assert by_hand.candidate.config.memory.activations.preset == "balanced"


# What is advised where it does not fit


def test_advice_is_never_empty() -> None:
    """As it is set it would fit with more host memory, and there is nothing to change."""
    advised = chosen_for(7, host=8).with_more_host
    assert advised is not None
    config = with_changes(config_with(), advised.changes)
    said = explain_misfit(chosen_for(7, config, host=8), config, machine_for("h200", None, 8, None))
    assert said.endswith(" GiB of host memory the current settings fit")


def test_what_auto_finds_is_named_where_the_nearest_is_slower() -> None:
    config = config_with(memory={"plan": "manual"})
    found, auto = chosen_for(24, config), chosen_for(24).candidate
    assert found.nearest is not None
    assert found.fastest is not None
    assert found.fastest.prediction.seconds == auto.prediction.seconds < found.nearest.prediction.seconds
    fastest = to_arguments(as_settings(config, auto.config))
    assert f"; fastest settings that fit: {fastest}, at " in explain_misfit(found, config, MACHINE)


def test_the_nearest_changes_the_least_of_what_is_set_by_hand() -> None:
    """And the rest is as fast as it can be: with one key set, what auto finds."""
    one = chosen_for(20, config_with(optimizer={"place": "device"}))
    assert one.nearest is not None
    assert one.nearest.prediction.seconds == chosen_for(20).candidate.prediction.seconds
    assert one.fastest is None
    two = chosen_for(20, config_with(optimizer={"place": "device"}, memory={"activations": {"preset": "recompute"}}))
    assert two.nearest is not None
    assert "optimizer.place" in two.nearest.changes
    assert "memory.activations" not in two.nearest.changes


@pytest.mark.parametrize(
    ("budget", "by_hand", "titles"),
    [
        (4.0, {}, ["the smallest plan:"]),
        (20, {"optimizer": {"place": "device"}}, ["the smallest plan:", "the nearest settings that fit:"]),
        (40, {"memory": {"plan": "manual"}}, ["with the current settings:", "the nearest settings that fit:"]),
    ],
)
def test_a_table_is_of_the_plan_that_the_text_speaks_of(
    budget: float, by_hand: dict[str, Any], titles: list[str]
) -> None:
    config = config_with(**by_hand)
    found = chosen_for(budget, config)
    shown = render_plan(found, with_changes(config, {"memory.budget_gib": budget}), find_shape(config.model), MACHINE)
    assert [line for line in shown.splitlines() if line.endswith(":")] == titles
    first, *others = (part for part in shown.split("\n\n") if "phase     seconds" in part)
    tightest = found.candidate.prediction.peak_phase
    (row,) = (line for line in first.splitlines() if line.startswith(tightest))
    (needed,) = re.findall(rf"the {tightest} phase needs ([\d.]+) GiB", shown)
    assert needed == f"{float(row.split()[3]):.3g}"
    if found.nearest is not None:
        (other,) = others
        rows = [line.split() for line in other.splitlines() if line.split()[0] in config.cycle]
        assert len(rows) == len(config.cycle)
        seconds = sum(float(row[1]) for row in rows)
        assert f"at {found.nearest.prediction.seconds:.1f} s per step" in shown
        assert seconds == pytest.approx(found.nearest.prediction.seconds, abs=0.03)


def test_a_run_that_is_let_begin_without_room_has_the_plan_that_takes_least() -> None:
    found = chosen_for(4.0)
    assert not found.fits
    assert found.candidate.prediction.min_peak < 0.5 * chosen_for(139).candidate.prediction.min_peak
