"""The plan: presets, rows of one's own, cells that cannot be, and any holdings and phases."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import MemoryConfig, OffloadConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.errors import UserError
from ebbtide.memory.plan import HoldingSpec, Plan, build_plan
from ebbtide.optim.costs import optimizer_holdings
from ebbtide.planner.holdings import plan_holdings
from ebbtide.policy.model_costs import weights_holding
from plans import plan_of

PHASES = (*GrpoConfig.model_validate(TINY).cycle, "save", "evaluate")
MOVABLE = ("grads", "master", "moments", "reference", "kv_cache")


def plan(**options) -> Plan:
    return plan_of(MemoryConfig.model_validate(options))


def test_keep_moves_nothing() -> None:
    made = plan()
    assert not any(made.offloaded_in(phase) for phase in PHASES)
    assert not any(made.is_ever_offloaded(holding) for holding in made.names)


def test_lean_sends_away_all_that_a_phase_does_not_need() -> None:
    made = plan(preset="lean")
    for phase in set(PHASES) - {"score"}:
        assert set(made.offloaded_in(phase)) == set(MOVABLE) - set(made.needs(phase))
    assert made.offloaded_in("score") == []
    assert made.to_fetch("score") == ["weights", "reference"]  # the next phase's, while scorers run


def test_own_rows_replace_the_presets() -> None:
    made = plan(preset="lean", offload={"generate": ["moments"], "logprob": []})
    assert made.offloaded_in("generate") == ["moments"]
    assert made.offloaded_in("logprob") == []
    assert "moments" in made.offloaded_in("train")


def test_the_optimizer_is_fetched_behind_the_forward() -> None:
    made = plan(offload={"generate": ["moments", "master"], "logprob": ["moments", "master"]})
    assert made.to_fetch("train") == ["weights", "grads", "master", "moments"]
    assert "moments" not in made.to_fetch("logprob")
    assert "moments" not in plan(offload={"train": ["moments"]}).to_fetch("train")


@pytest.mark.parametrize(
    ("phase", "holding"), [("train", "grads"), ("step", "moments"), ("step", "master"), ("logprob", "reference")]
)
def test_a_cell_that_cannot_be_is_named(phase, holding) -> None:
    with pytest.raises(UserError) as caught:
        plan(offload={phase: [holding]})
    assert f"`memory.offload.{phase}` names `{holding}`" in str(caught.value)
    assert "This phase can offload" in str(caught.value)


def test_names_that_no_run_has_are_refused_and_those_of_other_runs_ignored() -> None:
    config = GrpoConfig.model_validate(merged(TINY, {"memory": {"offload": {"train": ["Reference", "kv-cache"]}}}))
    made = plan_holdings(config)
    assert "reference" not in made.names  # there is no KL penalty
    assert made.offloaded_in("train") == ["kv_cache"]
    for name in ("weights", "activations", "moment"):
        with pytest.raises(UserError) as caught:
            plan(offload={"generate": [name]})
        assert f"`memory.offload.generate` names `{name}`" in str(caught.value)
        assert f"these are {', '.join(MOVABLE)}" in str(caught.value)


@pytest.mark.parametrize("options", [{"place": "streamed"}, {"place": "cpu"}, {"cpu_fraction": 1.0}])
def test_state_on_the_host_stays_there_and_cannot_be_sent_away(options) -> None:
    made = plan_of(MemoryConfig(preset="lean"), OptimizerConfig(**options))
    for phase in PHASES:
        assert made.place(phase, "moments") == made.place(phase, "master") == "host"
    assert not made.is_ever_offloaded("moments")
    with pytest.raises(UserError, match=r"`memory.offload.generate` names `moments`.*`optimizer\..*lives on the host"):
        plan_of(MemoryConfig.model_validate({"offload": {"generate": ["moments"]}}), OptimizerConfig(**options))
    # half of it can
    plan_of(MemoryConfig.model_validate({"offload": {"generate": ["moments"]}}), OptimizerConfig(cpu_fraction=0.5))


def test_the_table_shows_every_cell() -> None:
    lines = plan(preset="lean").table_rows()
    assert [line[0] for line in lines] == ["phase", *PHASES]
    assert lines[1] == ["generate", "device", "away", "away", "away", "away", "device"]
    assert plan(preset="lean").moves_anything
    assert not plan().moves_anything


def test_how_ranks_gather_weights_is_a_cell_of_both_phases_that_sample() -> None:
    for gathering, place in ((None, "device"), ("gathered", "gathered"), ("layerwise", "layerwise")):
        made = plan_of(gathered_by=gathering)
        assert {phase: made.place(phase, "weights") for phase in ("generate", "evaluate", "train")} == {
            "generate": place,
            "evaluate": place,
            "train": "device",
        }
        assert made.gathers_weights == (gathering is not None)

    def gathering(parallel, parts):
        return GrpoConfig.model_validate(merged(TINY, {"parallel": parallel})).rollout_weights(parts)

    assert gathering({"gpus": 2}, 2) == gathering(None, 2) == "gathered"  # also of ranks that torchrun started
    assert gathering({"gpus": 2, "rollout_weights": "layerwise"}, 2) == "layerwise"
    # each rank has all of them
    assert gathering({"data": 2, "replicate": 2, "rollout_weights": "layerwise"}, 1) is None


def test_an_algorithm_without_generation_has_its_own_rows() -> None:
    holdings = [weights_holding(), *optimizer_holdings(OptimizerConfig())]
    made = build_plan(MemoryConfig(preset="lean"), holdings, ("train", "step"))
    assert made.phases == ("train", "step", "save", "evaluate")
    assert made.offloaded_in("train") == ["master", "moments"]
    assert made.next_phase("step") == made.next_phase("save") == "train"
    assert not made.gathers_weights
    with pytest.raises(UserError, match=r"`memory.offload.generate` is set, but this algorithm has no generate phase"):
        build_plan(
            MemoryConfig.model_validate({"offload": {"generate": ["moments"]}}), holdings, ("train", "step"), MOVABLE
        )


phase_names = st.sampled_from(["generate", "score", "logprob", "train", "step", "judge", "merge"])
cycles = st.lists(phase_names, min_size=1, max_size=6, unique=True)


@st.composite
def specs(draw, cycle):
    """Any holdings for the phases of a cycle."""
    some = st.frozensets(st.sampled_from([*cycle, "save", "evaluate"]))
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=4), unique=True, max_size=6))
    return [
        HoldingSpec(
            name,
            draw(some),
            movable=draw(st.booleans()),
            frozen=draw(st.booleans()),
            host_setting=draw(st.sampled_from([None, None, "`a: b`"])),
            transient=draw(st.booleans()),
        )
        for name in names
    ]


@given(st.data(), cycles, st.sampled_from(["keep", "lean"]))
def test_any_table_keeps_the_rules(data, cycle, preset) -> None:
    holdings = data.draw(specs(cycle))
    places = [spec for spec in holdings if not spec.transient]
    rows = {}
    for phase in cycle:
        free = [
            spec.name for spec in places if spec.movable and spec.host_setting is None and phase not in spec.needed_in
        ]
        if phase in OffloadConfig.model_fields and data.draw(st.booleans()):
            rows[phase] = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    made = build_plan(MemoryConfig.model_validate({"preset": preset, "offload": rows}), holdings, cycle)
    assert made.phases == (*cycle, "save", "evaluate")
    for phase in made.phases:
        assert set(made.table[phase]) == {spec.name for spec in places}
        for spec in places:
            place = made.place(phase, spec.name)
            assert (place == "host") == (spec.host_setting is not None)
            if phase in spec.needed_in and spec.host_setting is None:
                assert place == "device"
            if place == "away":
                assert spec.movable
                assert spec.name in made.could_offload(phase)
                assert spec.name not in made.to_fetch(phase)
        if phase in rows:
            assert sorted(made.offloaded_in(phase)) == sorted(rows[phase])
        # What is away in a phase and needed in the next is fetched by that one at the latest.
        assert set(made.needs(made.next_phase(phase))) <= set(made.to_fetch(made.next_phase(phase)))
        assert made.to_fetch(phase)[: len(made.needs(phase))] == made.needs(phase)


def test_the_plan_imports_no_torch() -> None:
    code = "import sys, ebbtide.planner.holdings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
