"""What scores the completions of imported runs: rules, reward functions, reward models, and several of them."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.importing.convert import Imported, import_config
from ebbtide.importing.write import render_lists
from ebbtide.planner.offline import Hardware, plan_offline
from tiny_reward_models import reward_model

FILES = Path(__file__).parent / "files"
VERL_MODEL = ["reward_model.enable=True", "reward_model.model.path=owner/judge-2.0"]
VERL_FUNCTION = ["custom_reward_function.path=rewards/mine.py", "custom_reward_function.reward_kwargs.scale=2"]
NEMO_MODEL = ["data.default.env_name=reward_model", "++env.reward_model.model_name=owner/judge"]


def imported(name: str, *overrides: str) -> Imported:
    return import_config(FILES / name, overrides)


def values(found: Imported, *keys: str) -> list[Any]:
    return [found.answers.taken[key].value if key in found.answers.taken else ... for key in keys]


def rewards(found: Imported) -> dict[str, Any]:
    """The rewards of the config that was loaded: only what is set."""
    given = found.config.task.rewards or {}
    return {name: one.model_dump(exclude_unset=True) for name, one in given.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("accuracy_reward", ["math_verify", ..., "solution"]),
        ("think_format_reward", [..., "trl.rewards:think_format_reward", None]),
        ("mine.rewards.length", [..., "mine.rewards:length", None]),
    ],
)
def test_one_reward_function_of_trl(given: str, expected: list[Any]) -> None:
    for weights in ([], ["reward_weights=[1.0]"]):
        found = imported("trl_grpo.yaml", f"reward_funcs={given}", *weights)
        assert values(found, "task.file.scorer", "task.python.object", "task.file.answer_field") == expected
        assert rewards(found) == {}
        assert not {"reward_funcs", "reward_weights"} & set(found.answers.none)


def test_several_rewards_of_trl_have_their_weights_in_its_order() -> None:
    functions = "[mine.rewards.length,accuracy_reward,other.length,owner/form-1.5]"
    given = ["reward_model_name_or_path=/models/rm", f"reward_funcs={functions}", "reward_weights=[5,0.5,1,-2,3]"]
    found = imported("trl_grpo.yaml", *given)
    assert rewards(found) == {
        "rm": {"reward_model": {"path": "/models/rm"}, "weight": 5.0},
        "length": {"python": {"object": "mine.rewards:length"}, "weight": 0.5},
        "accuracy_reward": {"scorer": "math_verify", "weight": 1.0},
        "length_4": {"python": {"object": "other:length"}, "weight": -2.0},
        "form-1_5": {"reward_model": {"path": "owner/form-1.5"}, "weight": 3.0},
    }
    assert values(found, "task.file.scorer", "task.python.object", "task.file.answer_field") == [..., ..., "solution"]
    assert not {one.partition("=")[0] for one in given} & set(found.answers.none)
    assert "weight: 0.5  # reward_weights (the command line)" in found.text
    assert "`evaluate.pass_reward` has to be the reward that passes" in render_lists(found.answers)


def test_rewards_of_trl_without_weights_are_added_up() -> None:
    found = imported("trl_grpo.yaml", "reward_funcs=[mine.a,mine.b]")
    assert {name: one["weight"] for name, one in rewards(found).items()} == {"a": 1.0, "b": 1.0}
    assert values(found, "task.file.answer_field") == [None]


def test_a_weight_of_one_reward_is_not_lost() -> None:
    found = imported("trl_grpo.yaml", "reward_funcs=mine.rewards.length", "reward_weights=[0.5]")
    assert rewards(found) == {"length": {"python": {"object": "mine.rewards:length"}, "weight": 0.5}}


@pytest.mark.parametrize("weights", ["[1]", "[1,2,3]", "[1,nan]", "[1,much]"])
def test_weights_of_trl_that_do_not_belong_to_the_rewards_are_said(weights: str) -> None:
    found = imported("trl_grpo.yaml", "reward_funcs=[mine.a,mine.b]", f"reward_weights={weights}")
    assert [one["weight"] for one in rewards(found).values()] == [1.0, 1.0]
    assert "not the weights of 2 rewards" in found.answers.none["reward_weights"]


@pytest.mark.parametrize("key", ["reward_funcs", "reward_model_name_or_path"])
def test_a_reward_model_of_trl(key: str) -> None:
    found = imported("trl_grpo.yaml", f"{key}=owner/reward-model")
    assert rewards(found) == {"reward-model": {"reward_model": {"path": "owner/reward-model"}}}
    assert values(found, "task.file.answer_field") == [None]
    assert key not in found.answers.none


def test_the_overlong_punishment_of_trl_is_no_reward_here() -> None:
    given = "reward_funcs=[get_soft_overlong_punishment,mine.a,mine.b]"
    found = imported("trl_grpo.yaml", given, "reward_weights=[1,2,3]")
    assert {name: one["weight"] for name, one in rewards(found).items()} == {"a": 2.0, "b": 3.0}
    assert "`advantage.overlong_buffer`" in found.answers.none["reward_funcs"]


def script(folder: Path, written: str) -> Imported:
    lines = ["from mine import length", "from trl.rewards import accuracy_reward as right"]
    lines += ["path = 'owner/first'", "judge = Auto.from_pretrained(path, num_labels=1)"]
    lines += ["policy = Auto.from_pretrained('Qwen/Qwen3-0.6B')"]
    lines += ["def form(completions, **columns): return [0.0]", "several = [form, judge]"]
    lines += ["GRPOConfig(num_generations=4)", f"GRPOTrainer(model=policy, reward_funcs={written})"]
    (folder / "script.py").write_text("\n".join(lines))
    return import_config(folder / "script.py")


def test_rewards_of_a_script(tmp_path: Path) -> None:
    own = {"python": {"object": f"{tmp_path / 'script.py'}:form"}, "weight": 1.0}
    first = {"reward_model": {"path": "owner/first"}, "weight": 1.0}
    assert values(script(tmp_path, "[length]"), "task.python.object") == ["mine:length"]
    assert values(script(tmp_path, "right"), "task.file.scorer") == ["math_verify"]
    assert rewards(script(tmp_path, "[form, 'owner/first']")) == {"form": own, "first": first}
    assert rewards(script(tmp_path, "several")) == {"form": own, "first": first}
    assert rewards(script(tmp_path, "judge")) == {"first": {"reward_model": {"path": "owner/first"}}}
    assert values(script(tmp_path, "[judge]"), "model.path") == ["Qwen/Qwen3-0.6B"]


def test_reward_functions_that_a_script_makes_have_no_name(tmp_path: Path) -> None:
    for written in ("make_reward(3)", "[length, make_reward(3)]"):
        found = script(tmp_path, written)
        assert "`task.python.object: module:name`" in found.answers.none["reward_funcs"]
        assert rewards(found) == {}


def test_reward_function_of_verl() -> None:
    found = imported("verl_plain.sh", *VERL_FUNCTION, "custom_reward_function.name=judge")
    assert values(found, "task.python.object", "task.python.options") == ["rewards/mine.py:judge", {"scale": 2}]
    assert values(found, "task.file.scorer", "task.file.answer_field") == [..., "reward_model.ground_truth"]
    assert values(imported("verl_plain.sh", VERL_FUNCTION[0]), "task.python.object") == [
        "rewards/mine.py:compute_score"
    ]


@pytest.mark.parametrize(
    "given", [VERL_MODEL, ["reward.reward_model.enable=True", "reward.reward_model.model_path=owner/judge-2.0"]]
)
def test_reward_model_of_verl(given: list[str]) -> None:
    part = given[0].rpartition(".")[0]
    found = imported("verl_plain.sh", *given, f"{part}.rollout.gpu_memory_utilization=0.8", f"{part}.nnodes=1")
    assert rewards(found) == {"judge-2_0": {"reward_model": {"path": "owner/judge-2.0"}}}
    assert values(found, "task.file.scorer", "task.file.answer_field") == [..., None]
    assert not [key for key in found.answers.none if key.startswith(part)]
    assert "the plan places the reward model" in found.answers.not_needed[f"{part}.nnodes"]


def test_a_reward_model_of_verl_that_is_off_or_has_no_path() -> None:
    off = imported("verl_plain.sh", "reward_model.enable=False", VERL_MODEL[1])
    assert rewards(off) == {}
    assert values(off, "task.file.scorer") == ["gsm8k"]
    assert "there is no reward model" in off.answers.not_needed["reward_model.model.path"]
    assert "to do: name a folder or a hub id" in imported("verl_plain.sh", VERL_MODEL[0]).text


@pytest.mark.parametrize(("loop", "there"), [("True", "it may ask the model"), ("False", "the function is not called")])
def test_reward_function_and_reward_model_of_verl(loop: str, there: str) -> None:
    found = imported("verl_plain.sh", *VERL_MODEL, *VERL_FUNCTION, f"reward_model.use_reward_loop={loop}")
    function = {"object": "rewards/mine.py:compute_score", "options": {"scale": 2}}
    assert rewards(found) == {
        "compute_score": {"python": function, "weight": 1.0},
        "judge-2_0": {"reward_model": {"path": "owner/judge-2.0"}, "weight": 1.0},
    }
    assert values(found, "task.python.object", "task.file.answer_field") == [..., "reward_model.ground_truth"]
    assert there in found.answers.none["reward_model.enable"]
    assert found.text.count("weight: 1.0  # to do: set it: there the ") == 2


def test_a_mix_of_verl_has_the_same_rewards_in_all_tasks() -> None:
    files = "data.train_files=[d/gsm8k/train.parquet,d/math/train.parquet]"
    mix = imported("verl_plain.sh", files, *VERL_MODEL).config.task.mix or {}
    assert {name: list(one.rewards or {}) for name, one in mix.items()} == {
        "gsm8k": ["judge-2_0"],
        "math": ["judge-2_0"],
    }
    mix = imported("verl_plain.sh", files, *VERL_FUNCTION).config.task.mix or {}
    assert [one.python.object for one in mix.values() if one.python] == ["rewards/mine.py:compute_score"] * 2


def test_reward_model_of_nemo_rl() -> None:
    more = ["++env.reward_model.precision=float32", "++env.reward_model.tokenizer.name=owner/judge"]
    more += ["++env.reward_model.resources.gpus_per_node=1", "++env.reward_model.reward_model_cfg.enabled=true"]
    found = imported("nemo_base.yaml", *NEMO_MODEL, *more)
    assert rewards(found) == {"judge": {"reward_model": {"path": "owner/judge", "dtype": "float32"}}}
    assert values(found, "task.file.scorer", "task.file.answer_field") == [..., None]
    assert not [key for key in found.answers.none if "reward_model" in key]
    other = imported("nemo_base.yaml", *NEMO_MODEL, "++env.reward_model.tokenizer.name=owner/other")
    assert "the tokenizer in the folder" in other.answers.none["env.reward_model.tokenizer.name"]


def test_a_reward_model_of_nemo_rl_that_no_data_name_is_not_taken() -> None:
    found = imported("nemo_base.yaml", NEMO_MODEL[1])
    assert rewards(found) == {}
    assert values(found, "task.file.scorer") == ["math_verify"]


def test_datasets_of_nemo_rl_have_the_environment_that_each_names() -> None:
    data = "data.train=[{dataset_name: owner/maths},{data_path: chats.jsonl, env_name: reward_model}]"
    mix = imported("nemo_base.yaml", NEMO_MODEL[1], data).config.task.mix or {}
    shown = {
        name: (list(one.rewards or {}), one.file.scorer, one.file.answer_field) for name, one in mix.items() if one.file
    }
    assert shown == {"maths": ([], "math_verify", "answer"), "chats": (["judge"], None, None)}


def test_judges_of_nemo_gym_have_no_counterpart_as_their_prompts_are_not_there() -> None:
    part = "env.nemo_gym.short_judge_model.responses_api_models.vllm_model"
    given = ["data.default.env_name=nemo_gym", f"++{part}.base_url=http://judge/v1", f"++{part}.model=null"]
    found = imported("nemo_base.yaml", *given, "++env.nemo_gym.other=1")
    assert "`task.rewards` with a `judge`" in found.answers.none[f"{part}.base_url"]
    assert f"{part}.model" in found.answers.not_needed
    assert "`judge`" not in found.answers.none["env.nemo_gym.other"]
    assert "`task.rewards`" in found.answers.none["data.default.env_name"]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [("task.file.scorer=numeric", ["numeric", None, []]), ("task.python.object=my:own", [None, "my:own", []])],
)
@pytest.mark.parametrize(
    "theirs",
    [
        ("verl_plain.sh", *VERL_MODEL),
        ("verl_plain.sh", *VERL_FUNCTION),
        ("trl_grpo.yaml", "reward_funcs=[accuracy_reward,mine.a]"),
    ],
)
def test_a_scorer_on_the_command_line_is_the_only_one(ours: str, expected: list[Any], theirs: tuple[str, ...]) -> None:
    found = imported(*theirs, ours, "task.file.answer_field=answer").config.task
    assert found.file is not None
    assert [found.file.scorer, found.python and found.python.object, list(found.rewards or {})] == expected


def test_rewards_on_the_command_line_are_added_or_change_others() -> None:
    several = ["trl_grpo.yaml", "reward_funcs=[accuracy_reward,mine.a]"]
    changed = rewards(imported(*several, "task.rewards.a.weight=0.5", "task.rewards.own.scorer=exact"))
    assert changed["a"] == {"python": {"object": "mine:a"}, "weight": 0.5}
    assert list(changed) == ["accuracy_reward", "a", "own"]
    own = {"own": {"scorer": "numeric"}}
    for name, *theirs in (["verl_plain.sh", *VERL_FUNCTION], ["verl_plain.sh"], ["trl_grpo.yaml"]):
        assert rewards(imported(name, *theirs, "task.rewards={own: {scorer: numeric}}")) == own
    assert rewards(imported(*several, "task.rewards=null")) == {}


def test_an_imported_reward_model_is_planned(tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    found = imported("trl_grpo.yaml", f"reward_model_name_or_path={path}", "reward_funcs=accuracy_reward")
    assert [one.path for one in found.config.reward_models] == [path]
    plan, _, _ = plan_offline(found.config, Hardware("h100", None, None, None, None, 8))
    assert plan.fits
