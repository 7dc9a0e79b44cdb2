"""Reading configs: what is valid loads, what is not says which key, which value, and what to write instead."""

import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from ebbtide.config import load, recipes
from ebbtide.config.document import reference, to_annotated_yaml, to_yaml
from ebbtide.errors import UserError


def refused(*arguments: str, source: str = "quickstart") -> str:
    with pytest.raises(UserError) as caught:
        load(source, arguments)
    return str(caught.value)


GIVEN = {  # what a recipe leaves to the command line
    "sft": ["model.path=a", "data.train=b"],
    "dpo": ["model.path=a", "data.train=b"],
    "distill": ["model.path=a", "teacher.path=b", "task.file.train=c"],
}


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads_and_has_a_line_of_its_own(name: str) -> None:
    assert load(name, GIVEN.get(name, [])).algorithm == (name if name in GIVEN else "grpo")
    assert len(recipes()[name]) > 20


@pytest.mark.parametrize("name", GIVEN)
def test_a_recipe_says_what_it_leaves_to_the_command_line(name: str) -> None:
    message = refused(source=name)
    assert "`model.path`" in message
    assert ("`data.train` is missing" in message) == (name != "distill")
    assert ("`task.file.train` is missing" in message) == (name == "distill")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("loss.kind=gspo",),
        ("loss.kl.coefficient=0.1", "loss.importance_sampling={}"),
        ("evaluate=null", "rollout.stop=['a', '\\n']"),
        ("model.scratch.architecture=qwen3_moe", "model.scratch.experts=4", "model.scratch.experts_per_token=2"),
    ],
)
@pytest.mark.parametrize("text", [to_yaml, to_annotated_yaml])
def test_what_is_written_reads_back_as_the_same_config(tmp_path, overrides, text) -> None:
    config = load("quickstart", overrides)
    file = tmp_path / "config.yaml"
    file.write_text(text(config))
    assert load(str(file)) == config


def test_override_values_are_yaml() -> None:
    config = load(
        "quickstart", ["optimizer.lr=1e-6", "optimizer.betas=[0.5, 0.6]", "evaluate=null", "task.system=hello there"]
    )
    assert (config.optimizer.lr, config.optimizer.betas, config.evaluate, config.task.system) == (
        1e-6,
        [0.5, 0.6],
        None,
        "hello there",
    )


def test_scientific_numbers_in_files_are_numbers(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(load("quickstart").model_dump(mode="json")).replace("lr: 0.001", "lr: 3e-4"))
    assert load(str(file)).optimizer.lr == 3e-4


def test_yaml_merges_work(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    shared = "x: &shape {hidden: 32, heads: 4, kv_heads: 2}\n"
    file.write_text(to_yaml(load("quickstart")).replace("optimizer:\n", "optimizer:\n  <<: {lr: 5.0, eps: 1.0e-5}\n"))
    assert load(str(file)).optimizer.lr == 1e-3
    file.write_text(shared + "model: {scratch: {<<: *shape}}\ntask: {builtin: {name: copy}}\n")
    assert "unknown key `x.hidden`" in refused(source=str(file))


def test_override_opens_a_section_that_was_off() -> None:
    assert load("quickstart", ["loss.kl.coefficient=0.5"]).loss.kl.coefficient == 0.5


def test_an_empty_stop_text_would_end_everything() -> None:
    with pytest.raises(UserError, match=r"rollout.stop"):
        load("quickstart", ["rollout.stop=['']"])


def test_names_and_nestings_without_end_are_no_traceback() -> None:
    with pytest.raises(UserError, match="neither a recipe nor a config file"):
        load("x" * 5000)
    with pytest.raises(UserError, match="not valid YAML"):
        load("quickstart", [f"rollout.stop={'[' * 5000}"])
    with pytest.raises(UserError, match="is not an override"):
        load("quickstart", [f"{'run.' * 5000}name=x"])


def test_a_date_is_a_text() -> None:
    for date in ("2024-02-29", "2024-02-30"):
        assert load("quickstart", [f"run.name={date}"]).run.name == date


@pytest.mark.parametrize("key", ["name", "folder"])
def test_names_have_no_control_characters(key) -> None:
    assert f"`run.{key}` is 'a\\x1b[31m', which has control characters" in refused(f'run.{key}="a\\e[31m"')


def test_a_run_named_after_a_file_is_held_to_it_too(tmp_path) -> None:
    file = tmp_path / "a\x1b[31m.yaml"
    file.write_text("seed: 1\n")
    assert "`run.name` is 'a\\x1b[31m', which has control characters" in refused(source=str(file))


def test_unknown_key_names_the_nearest() -> None:
    assert "unknown key `optimizer.learning_rte`" in refused("optimizer.learning_rte=1")
    assert "`train.microbatch_tokens`" in refused("train.micro_batch_tokens=1")
    assert "Did you mean `rollout.prompts_per_step`?" in refused("rollout.prompt=3")  # a key that begins so
    assert "Did you mean `rollout.temperature` or `evaluate.temperature` or" in refused("train.temperature=1")
    assert "Valid keys here: level, mode, high, low" in refused("loss.importance_sampling.zzz=1")
    assert "unknown key `optimiser` (= {'lr': 1, 'eps': 1}). Did you mean `optimizer`?" in refused(
        "optimiser.lr=1", "optimiser.eps=1"
    )
    assert "unknown key `what` (= {'is': {'this': 1}}). Valid keys here: algorithm, seed, " in refused("what.is.this=1")


def test_wrong_type_names_key_value_and_meaning() -> None:
    text = refused("train.steps=many")
    assert "`train.steps`" in text
    assert "'many'" in text
    assert "integer" in text
    assert "Steps of the run" in text


def test_strict_types_are_not_coerced() -> None:
    assert "`train.steps`" in refused("train.steps='5'")
    assert "`report.rollouts`" in refused("report.rollouts=1")


@pytest.mark.parametrize(
    ("overrides", "needles"),
    [
        (["model.path=x"], ["`model.path`", "`model.scratch`", "both"]),
        (["model.scratch=null"], ["`model.path`", "`model.scratch`", "neither"]),
        (["task.gym.dataset=x"], ["`task.builtin`", "`task.gym`"]),
        (["rollout.group_size=1"], ["`rollout.group_size: 1`", "`advantage.kind: group_std`", "reinforce_pp"]),
        (["rollout.max_new_tokens=9999"], ["`train.microbatch_tokens`", "10015"]),
        (["evaluate.k=[1, 9]"], ["`evaluate.k: [1, 9]`", "`evaluate.samples`"]),
        (["evaluate.temperature=0"], ["`evaluate.temperature: 0`", "`evaluate.samples: 1`"]),
        (["loss.kind=gspo", "loss.normalise=token"], ["`loss.kind: gspo`", "`loss.normalise: token`"]),
        (["run.overwrite=true"], ["`run.overwrite`", "`run.folder`"]),
        (["optimizer.final_lr_fraction=0.1"], ["`optimizer.final_lr_fraction: 0.1`", "`optimizer.schedule"]),
        (["optimizer.min_lr=1e-7"], ["`optimizer.min_lr: 1e-07`", "`optimizer.schedule: constant`"]),
        (["optimizer.min_lr=1", "optimizer.schedule=linear"], ["`optimizer.min_lr: 1` is above `optimizer.lr"]),
        (
            ["optimizer.min_lr=0", "optimizer.schedule=linear", "optimizer.final_lr_fraction=0.1"],
            ["`optimizer.min_lr: 0` and `optimizer.final_lr_fraction: 0.1` both"],
        ),
        (["memory.activations.offload=[]"], ["`memory.activations.offload: []` names no module"]),
        (
            ["memory.activations.offload=[mlp_act]", "memory.activations.recompute=[mlp_act]"],
            ["`mlp_act` is in `memory.activations.offload` and in `memory.activations.recompute`"],
        ),
        (["memory.activations.offload=[mlp_fc3]"], ["mlp_fc3", "mlp_fc2"]),
        (
            ["optimizer.place=cpu", "optimizer.cpu_fraction=0.5"],
            ["`optimizer.place: cpu`", "`optimizer.cpu_fraction: 0.5`", "`streamed`"],
        ),
        (["task.held_out=0"], ["`task.held_out: 0`", "`evaluate: null`"]),
        (["train.minibatches=100000"], ["`train.minibatches: 100000`", "512 sequences"]),
        (["model.scratch.experts=4"], ["`architecture: qwen3`", "`experts`"]),
        (["model.scratch.kv_heads=3"], ["heads = 4", "kv_heads = 3"]),
        (["loss.kind=ppo"], ["`loss.kind`", "'ppo'", "'grpo'"]),
        (["optimizer.betas=[0.9, 1.0]"], ["`optimizer.betas.1`", "less than 1"]),
        (["seed=4294967296"], ["`seed`", "less than 4294967296"]),
        (["model.scratch.hidden=12"], ["3 channels", "even"]),
        (["model.tokenizer=x"], ["`model.tokenizer`", "`model.scratch.alphabet`"]),
        (["evaluate.problems=200"], ["`evaluate.problems: 200`", "`task.held_out: 128`"]),
        (["evaluate.final.problems=200"], ["`evaluate.final.problems: 200`", "`task.held_out: 128`"]),
        (["evaluate.final.samples=2"], ["`evaluate.final.k: [1, 8]`", "`evaluate.final.samples` = 2"]),
        (["run.name=../x"], ["`run.name` is '../x'", "`run.folder`"]),
        (["run.name="], ["`run.name` is ''"]),
        (["run.folder="], ["`run.folder` is empty"]),
        (["rollout.temperature=1e-300"], ["`rollout.temperature`", "0.000001"]),
        (["optimizer.betas=[0.9]"], ["`optimizer.betas` is [0.9] and should have at least 2 items."]),
        (["optimizer.lr=-1"], ["`optimizer.lr`", "-1", "greater than 0"]),
    ],
)
def test_contradictions_name_both_sides(overrides, needles) -> None:
    text = refused(*overrides)
    for needle in needles:
        assert needle in text, text


def test_several_mistakes_are_told_at_once() -> None:
    text = refused("train.stepz=1", "optimizer.lr=fast")
    assert "train.stepz" in text
    assert "optimizer.lr" in text


def test_overrides_that_are_not() -> None:
    assert "`train.steps` is not an override" in refused("train.steps")
    assert "not a section" in refused("train.steps.deep=1")


def test_sources_that_are_not(tmp_path) -> None:
    assert "Did you mean `quickstart`?" in refused(source="quikstart")
    file = tmp_path / "bad.yaml"
    file.write_text("a: [1")
    assert "not valid YAML" in refused(source=str(file))
    file.write_text("")
    assert "is empty" in refused(source=str(file))
    file.write_text("- 1\n")
    assert "`key: value`" in refused(source=str(file))
    file.write_text("seed: 1\nseed: 2\n")
    assert "twice" in refused(source=str(file))
    file.write_text("[1, 2]: 3\n")
    assert "is not a text" in refused(source=str(file))
    file.write_text("run: 3\n")
    assert "`run`" in refused(source=str(file))


def test_missing_section_says_what_it_is(tmp_path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("seed: 1\n")
    assert "`model` is missing: The policy." in refused(source=str(file))


def test_importing_config_and_tasks_imports_no_torch() -> None:
    code = "import sys, ebbtide.cli, ebbtide.config, ebbtide.tasks.scoring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_docs_are_not_stale() -> None:
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("given", ["thinking", ["<a>"], ["<a>", ""], 3])
def test_a_format_of_reasoning_that_is_none_gets_one_sentence(tiny, given) -> None:
    with pytest.raises(ValidationError) as error:
        tiny({"task.reasoning_parser": given})
    assert error.value.error_count() == 1
    assert "should be `auto`, `think`, `harmony` or a list of the two texts" in str(error.value)
    assert tiny({"task.reasoning_parser": ["<a>", "</a>"]}).task.reasoning_parser == ["<a>", "</a>"]
