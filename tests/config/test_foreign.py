"""Names from other tools: each is answered with a key that exists, or with why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ebbtide.config import foreign, load, load_serve
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.document import reference
from ebbtide.config.keys import all_keys
from ebbtide.config.roots import roots
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError

QUOTED = re.compile(r"`([^`]+)`")
GIVEN = {  # what the recipe of an algorithm leaves to the command line
    "sft": ["model.path=a", "data.train=b"],
    "dpo": ["model.path=a", "data.train=b"],
    "distill": ["model.path=a", "teacher.path=b", "task.file.train=c"],
}


def said(*overrides: str, source: str = "quickstart") -> str:
    with pytest.raises(UserError) as caught:
        load(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize("root", [*roots().values(), ServeConfig])
def test_every_key_that_an_answer_names_exists(root: type) -> None:
    keys = set(all_keys(root))
    for name, text in foreign.foreign_names(root).items():
        assert name == name.lower().replace("-", "_")
        quoted = QUOTED.findall(text)
        named = {one.partition("=")[0] for one in quoted if "." in one or "=" in one}
        assert named <= keys, (name, named - keys)
        if text.startswith("`"):
            assert quoted[0] in keys, name
        else:
            assert text.startswith(("Not here", "Always so")), name


def test_settings_that_answers_write_out_can_be_set() -> None:
    texts = list(foreign.foreign_names(GrpoConfig).values())
    written = {one for text in texts for one in QUOTED.findall(text) if re.fullmatch(r"[a-z_.]+=\S+", one)}
    assert len(written) > 10
    for one in written:
        load("quickstart", [one])


@pytest.mark.parametrize("name", GIVEN)
def test_settings_that_answers_of_another_algorithm_write_out_can_be_set(name: str) -> None:
    own = foreign.own_names(roots()[name])
    assert own
    for text in own.values():
        for one in QUOTED.findall(text):
            if re.fullmatch(r"[a-z_.]+=\S+", one):
                load(name, [*GIVEN[name], one])


def test_values_are_of_keys_that_exist_and_are_not_taken_already() -> None:
    for key, values in foreign._tables()["values"].items():
        assert key in set(all_keys(GrpoConfig))
        for value, text in values.items():
            message = said(f"{key}={value}")
            assert f"About {value}: {text}" in message, message
            for setting in re.findall(r"`([a-z_.]+=[^`]+)`", text):
                load("quickstart", [setting])
            for option in re.findall(r"write `([a-z0-9_]+)`", text):
                load(
                    "quickstart",
                    [f"{key}={option}", *(["loss.kl.coefficient=1"] if key.startswith("loss.kl.") else [])],
                )


@pytest.mark.parametrize("root", roots().values())
def test_no_name_is_one_of_ours(root: type) -> None:
    """Else a key of ours at the wrong place would be sent elsewhere."""
    leaves = {key.rsplit(".", 1)[-1] for key in all_keys(root)}
    both = leaves & set(foreign.foreign_names(root))
    assert both <= {"dataset"}, both  # of `task.gym`, where it is known


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("gradient_checkpointing=true", "`memory.activations.preset`"),
        ("num_generations=8", "Here it is `rollout.group_size`."),
        ("train.num_generations=8", "Here it is `rollout.group_size`."),
        ("learning_rate=1e-6", "Here it is `optimizer.lr`."),
        ("optimizer.learning_rate=1e-6", "Here it is `optimizer.lr`."),
        ("Learning-Rate=1e-6", "Here it is `optimizer.lr`."),
        ("beta=0.04", "Here it is `loss.kl.coefficient`"),
        ("optimizer.beta=[0.9, 0.99]", "Did you mean `optimizer.betas`?"),
        ("rollout.n=8", "Here it is `rollout.group_size`."),
        ("lora.rank=16", "Did you mean `model.lora.rank`?"),
        ("lora_alpha=16", "Here it is `model.lora.alpha`."),
        ("model.lora.target_modules=[q_proj]", "Here it is `model.lora.targets`."),
        ("gpu_memory_utilization=0.9", "`rollout.vllm.memory_share`"),
        ("data.train_files=x.parquet", "Here it is `task.file.train`"),
        ("+trainer.n_gpus_per_node=8", "unknown key `trainer.n_gpus_per_node` (= 8). Here it is `parallel.gpus`"),
        ("actor_rollout_ref.model.path=x", "Did you mean `model.path`?"),
        ("actor_rollout_ref.rollout.temperature=1", "Did you mean `rollout.temperature`?"),
        ("steps=3", "Did you mean `train.steps`?"),
        ("rollout.steps=3", "Did you mean `train.steps`?"),
        ("train.step=3", "Did you mean `train.steps`?"),
        ("report_to=wandb", "Here it is `report.wandb`"),
        ("checkpoint_dir=/tmp/x", "Here it is `run.folder`."),
        ("samples=3", "Did you mean `evaluate.samples` or `evaluate.final.samples`?"),
        ("model.dtype=fp16", "float16 overflows without loss scaling"),
    ],
)
def test_a_foreign_name_is_answered(override: str, answer: str) -> None:
    assert answer in said(override)


@pytest.mark.parametrize(
    ("recipe", "override", "answer"),
    [
        ("sft", "learning_rate=1e-5", "Here it is `optimizer.lr`."),
        ("sft", "max_length=512", "Here it is `data.max_tokens`"),
        ("sft", "max_tokens=512", "Did you mean `data.max_tokens`?"),
        ("sft", "packing=true", "Always so: sequences are packed"),
        ("sft", "assistant_only_loss=true", "Here it is `data.loss_on`"),
        ("sft", "per_device_train_batch_size=8", "Here it is `data.batch_size`"),
        ("sft", "kl_coef=0.1", "unknown key `kl_coef`"),
        ("dpo", "beta=0.1", "Did you mean `loss.beta`?"),
        ("dpo", "label_smoothing=0.1", "Did you mean `loss.label_smoothing`?"),
        ("dpo", "loss_type=ipo", "Here it is `loss.kind`"),
        ("dpo", "precompute_ref_log_probs=true", "Here it is `loss.reference`"),
        ("distill", "lmbda=0.5", "Here it is `task`, whose prompts are sampled"),
        ("distill", "teacher_model_name_or_path=x", "Here it is `teacher.path`."),
        ("distill", "beta=0.5", "Did you mean `loss.beta`?"),
    ],
)
def test_a_foreign_name_is_answered_for_its_algorithm(recipe: str, override: str, answer: str) -> None:
    text = said(override, *GIVEN[recipe], source=recipe)
    assert answer in text
    assert "loss.kl" not in text


VERL = {
    "data": {"train_files": "a.parquet", "max_prompt_length": 512, "unheard_of": 1},
    "actor_rollout_ref": {
        "rollout": {"n": 8, "name": "vllm"},
        "actor": {"optim": {"lr": 1e-6}, "fsdp_config": {"param_offload": True}},
    },
}


def test_a_whole_file_of_another_tool_is_answered_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump(VERL))
    text = said(source=str(file))
    for key, ours in {
        "data.train_files": "task.file.train",
        "data.max_prompt_length": "rollout.max_prompt_tokens",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "actor_rollout_ref.rollout.name": "rollout.engine",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    }.items():
        assert re.search(rf"unknown key `{re.escape(key)}` \(= .*\)\. Here it is `{re.escape(ours)}`", text), text
    assert (
        "unknown key `actor_rollout_ref.actor.fsdp_config.param_offload` (= True). Not here: the policy's weights stay"
        in text
    )
    assert "unknown keys `data.unheard_of`." in text


def test_a_section_of_many_keys_is_not_answered_without_end() -> None:
    many = ", ".join(f"learning_rate_{number}: 1, x{number}: {{lr: 1}}" for number in range(500))
    assert len(said(f"actor={{{many}}}").splitlines()) < 60


def test_the_server_answers_as_well() -> None:
    with pytest.raises(UserError, match=r"unknown key `max_model_len` \(= 4096\). Here it is `max_length`"):
        load_serve(["max_model_len=4096"])
    with pytest.raises(UserError, match=r"Not here: `--api-key-file FILE`"):
        load_serve(["api_key=secret"])


def test_the_table_is_documented() -> None:
    page = reference()
    assert "| `num_generations` | `rollout.group_size` |" in page
    assert all(f"| `{name}` |" in page for root in roots().values() for name in foreign.foreign_names(root))


def test_a_section_of_ours_is_no_foreign_name_for_a_wrong_key_in_it() -> None:
    judge = "{url: 'http://localhost:8000/v1', model: m, prompt: 'Rate {completion}', scale: [0, 10]}"
    with pytest.raises(UserError, match=r"rewards\.liked\.judge\.scale` .* Valid keys here: url, model"):
        load("quickstart", [f"task.rewards={{liked: {{judge: {judge}}}}}"])
