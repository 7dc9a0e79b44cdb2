"""Whole files of NeMo RL, verl and TRL, written for this test in their style, and what becomes of each key."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import load
from ebbtide.errors import UserError
from ebbtide.importing.convert import Imported, import_config
from ebbtide.importing.write import render_lists
from ebbtide.planner.offline import Hardware, plan_offline

FILES = Path(__file__).parent / "files"
REFUSED = ("nemo_ppo.yaml",)
IMPORTED = sorted(path.name for path in FILES.iterdir() if path.name not in REFUSED)


def imported(name: str, *overrides: str) -> Imported:
    return import_config(FILES / name, overrides)


def values(found: Imported, *keys: str) -> list[Any]:
    return [found.answers.taken[key].value if key in found.answers.taken else ... for key in keys]


@pytest.mark.parametrize("name", IMPORTED)
def test_every_file_loads_plans_and_has_all_keys_answered(name: str, tmp_path: Path) -> None:
    found = imported(name)
    (tmp_path / "mine.yaml").write_text(found.text)
    config = load(str(tmp_path / "mine.yaml"))
    assert config.model_dump(exclude={"run"}) == found.config.model_dump(exclude={"run"})
    plan_offline(config, Hardware("h100", None, None, None, None, 8))
    answers = found.answers
    unanswered = [
        key for key, one in answers.source.keys.items() if not answers.is_answered(key) and not one.is_default
    ]
    assert unanswered == []
    for line in found.text.splitlines()[2:]:
        assert "  # " in line or line.endswith(":"), line


def test_nemo_rl_grpo() -> None:
    found = imported("nemo_base.yaml")
    assert values(found, "rollout.prompts_per_step", "rollout.group_size", "train.minibatches") == [16, 8, 2]
    assert values(found, "rollout.max_prompt_tokens", "rollout.max_new_tokens") == [256, 768]
    assert values(found, "optimizer.lr", "optimizer.betas", "optimizer.warmup_steps") == [5e-6, [0.9, 0.98], 5]
    assert values(found, "parallel.gpus", "parallel.tensor") == [8, 2]
    assert values(found, "advantage.kind", "loss.normalise", "loss.kl.coefficient") == ["group_std", "token", 0.02]
    assert values(found, "checkpoint.deadline_minutes", "checkpoint.metric") == [210.0, "evaluate/reward"]
    assert values(found, "task.file.scorer", "evaluate.problems", "task.held_out") == ["math_verify", 32, 32]
    assert "# policy.optimizer.kwargs.lr (nemo_base.yaml:" in found.text
    said = render_lists(found.answers)
    assert "16 prompts x 8 samples = 128 sequences a step" in said
    assert "128 sequences / 64 of an update = 2 updates a step" in said
    assert (
        "64 sequences of an update / (4 of a micro-batch x 4 data-parallel ranks) = 4 of gradient accumulation" in said
    )
    assert found.answers.not_needed["policy.megatron_cfg.tensor_model_parallel_size"].startswith(
        "`policy.megatron_cfg` is"
    )
    assert "data.default.prompt_file" in found.answers.none


def test_nemo_rl_memory_and_checkpoint_keys_of_the_megatron_worker() -> None:
    found = imported("nemo_megatron.yaml")
    assert values(found, "memory.offload.logprob") == [["moments", "master"]]
    assert values(found, "optimizer.place", "optimizer.cpu_fraction", "optimizer.overlap") == ["device", 0.5, True]
    assert values(found, "memory.activations.offload") == [["core_attn", "attn_proj", "moe_act"]]
    assert values(found, "memory.activations.recompute") == [["attn_norm", "mlp_norm"]]
    assert values(found, "checkpoint.async_save", "checkpoint.fully_parallel_load") == [True, False]
    assert values(found, "run.distributed_timeout_minutes", "run.logging_level") == [30, "info"]
    assert values(found, "optimizer.check_for_nan_in_grad", "optimizer.schedule") == ["stop", "cosine"]
    assert values(found, "optimizer.final_lr_fraction") == [pytest.approx(0.1)]
    assert "expert_fc1 is not saved" in found.answers.none["policy.megatron_cfg.offload_modules"]
    # Experts are not tensor-parallel here, and there are no stages; both are said.
    assert values(found, "parallel.gpus", "parallel.tensor") == [16, ...]
    part = "policy.megatron_cfg"
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        assert "`parallel.data`" in found.answers.none[f"{part}.{key}"]


def test_nemo_rl_sft_dpo_and_distillation() -> None:
    sft = imported("nemo_sft.yaml")
    assert values(sft, "data.batch_size", "data.max_tokens", "data.train") == [32, 1024, "mine/train.jsonl"]
    assert values(sft, "data.prompt_field", "data.completion_field", "data.held_out_rows") == ["question", "reply", 64]
    assert values(sft, "model.lora.rank", "optimizer.clip_norm", "checkpoint") == [16, None, None]
    assert "policy.dtensor_cfg.lora_cfg.dropout" in sft.answers.none
    dpo = imported("nemo_dpo.yaml")
    assert values(dpo, "loss.beta", "data.batch_size", "optimizer.place") == [0.05, 128, "cpu"]
    assert "dpo.sft_loss_weight" in dpo.answers.none
    distill = imported("nemo_distill.yaml")
    assert values(distill, "teacher.path", "loss.beta", "rollout.max_prompt_tokens") == ["Qwen/Qwen3-4B", 0.0, 128]


def test_nemo_rl_overrides_are_interpolated_and_ours_are_taken() -> None:
    found = imported(
        "nemo_base.yaml",
        "policy.max_total_sequence_length=4096",
        "++policy.precision=float32",
        "task.file.train=my.jsonl",
    )
    assert values(found, "rollout.max_new_tokens", "model.dtype") == [3840, "float32"]
    assert values(found, "task.file.train") == ["my.jsonl"]
    assert "the command line" in found.text


def test_ppo_is_refused() -> None:
    with pytest.raises(UserError, match="PPO with a value model"):
        imported("nemo_ppo.yaml")
    with pytest.raises(UserError, match=r"`algorithm\.adv_estimator=gae` is not in Ebbtide, which has no value model"):
        imported("verl_plain.sh", "algorithm.adv_estimator=gae")


def test_verl_command() -> None:
    found = imported("verl_plain.sh")
    assert values(found, "rollout.prompts_per_step", "rollout.group_size", "train.minibatches") == [256, 5, 4]
    assert values(found, "model.path", "task.file.train") == ["Qwen/Qwen3-8B", "~/data/gsm8k/train.parquet"]
    assert values(found, "task.file.scorer", "task.overlong_prompts") == ["gsm8k", "drop"]
    assert values(found, "loss.kl.coefficient", "loss.kl.estimator", "loss.clip_low") == [0.001, "k3", 0.2]
    assert values(found, "memory.preset", "parallel.gpus", "optimizer.weight_decay") == ["lean", 8, 0.01]
    assert values(found, "checkpoint.every", "evaluate.every", "report.wandb.project") == [20, 5, "plain"]
    assert "to do: 15 epochs are 15 x rows / 256 steps" in found.text
    # verl clips twice by default, and that has an answer although the command does not say it.
    assert values(found, "loss.clip_ratio_c") == [3.0]


def test_verl_script_with_arrays() -> None:
    found = imported("verl_arrays.sh")
    assert values(found, "rollout.max_prompt_tokens", "rollout.max_new_tokens") == [2048, 8192]
    assert values(found, "train.minibatches", "train.steps", "optimizer.warmup_steps") == [16, 10, 16]
    assert values(found, "advantage.kind", "loss.normalise") == ["group_mean", "sequence"]
    assert "`/models/Qwen2.5-32B` is not here" in found.answers.taken["model.path"].how
    assert values(found, "model.path") == ["Qwen/Qwen2.5-32B"]
    assert values(found, "task.mix.a.file.train", "task.mix.b.file.train") == ["/data/a.parquet", "/data/b.parquet"]
    assert "only known where it runs" in found.answers.taken["parallel.gpus"].how
    assert found.answers.none["some.new_key"].startswith("unknown")
    assert values(found, "advantage.dynamic_sampling.max_num_gen_batches") == [10]


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        (
            "verl_plain.sh",
            [
                "actor_rollout_ref.actor.use_kl_loss=False",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.kl_coef=0.01",
            ],
            {"loss.kl.in_reward": True, "loss.kl.coefficient": 0.01, "loss.kl.estimator": "k1"},
        ),
        (
            "verl_plain.sh",
            ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
            {"advantage.kind": "reinforce_pp_baseline", "advantage.whiten": "token"},
        ),
        (
            "verl_plain.sh",
            ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=64"],
            {"advantage.overlong_buffer.length": 64, "advantage.overlong_buffer.penalty": 1.0},
        ),
        (
            "verl_plain.sh",
            ["data.apply_chat_template_kwargs.enable_thinking=False"],
            {"model.chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("nemo_base.yaml", ["grpo.reward_shaping.enabled=true"], {"advantage.overlong_buffer.length": 128}),
        (
            "nemo_base.yaml",
            ["grpo.adv_estimator.name=reinforce_plus_plus"],
            {"advantage.kind": "reinforce_pp", "advantage.whiten": "token"},
        ),
        (
            "nemo_base.yaml",
            ["loss_fn.use_kl_in_reward=true", "grpo.overlong_filtering=false"],
            {"loss.kl.in_reward": True},
        ),
        ("nemo_base.yaml", ["loss_fn.use_on_policy_kl_approximation=true"], {"loss.kl.importance_ratio": "rollout"}),
        ("trl_grpo.yaml", ["use_bias_correction_kl=true"], {"loss.kl.importance_ratio": "old"}),
        ("trl_grpo.yaml", ["delta=4.0"], {"loss.clip_ratio_c": 4.0}),
    ],
)
def test_settings_of_rewards_and_losses(name: str, overrides: list[str], expected: dict[str, Any]) -> None:
    found = imported(name, *overrides)
    assert values(found, *expected) == list(expected.values())
    assert not {one.partition("=")[0] for one in overrides} & set(found.answers.none)


def test_a_dual_clip_that_is_none_has_no_counterpart() -> None:
    found = imported("verl_plain.sh", "actor_rollout_ref.actor.clip_ratio_c=0.5")
    assert "`loss.clip_ratio_c`, for ratios above 1" in found.answers.none["actor_rollout_ref.actor.clip_ratio_c"]


def test_verl_hydra_yaml() -> None:
    found = imported("verl_hydra.yaml")
    assert values(found, "advantage.kind", "loss.kind", "rollout.max_num_seqs") == ["rloo", "gspo", 128]
    assert values(found, "model.lora.rank", "model.lora.alpha", "model.lora.targets") == [32, 64, ...]
    assert "loss.normalise" not in found.answers.taken
    assert any("`ppo_trainer` in `defaults`" in note for note in found.answers.source.notes)


@pytest.mark.parametrize(
    ("excluded", "expected"),
    [("['*out_proj*',model.layers.mlp.gate_proj]", ["out_proj", "gate_proj"]), ("[vision_tower,.*visual.*]", ...)],
)
def test_layers_without_adapters(excluded: str, expected: Any) -> None:
    cases = [
        ("nemo_sft.yaml", "policy.dtensor_cfg.lora_cfg.exclude_modules", "policy.dtensor_cfg.lora_cfg.enabled=true"),
        ("verl_hydra.yaml", "actor_rollout_ref.model.exclude_modules", "actor_rollout_ref.model.lora_rank=32"),
        ("trl_grpo.yaml", "lora_exclude_modules", "use_peft=true"),
    ]
    for name, key, switch in cases:
        found = imported(name, switch, f"{key}={excluded}")
        assert values(found, "model.lora.exclude") == [expected], name
        assert key not in found.answers.none


def test_trl_yaml() -> None:
    found = imported("trl_grpo.yaml")
    assert values(found, "rollout.prompts_per_step", "rollout.group_size", "train.minibatches") == [16, 4, 4]
    assert values(found, "train.steps", "loss.normalise", "advantage.kind") == [25, "constant", "group_mean"]
    assert values(found, "loss.kl.coefficient", "loss.clip_low", "loss.clip_high") == [0.04, 0.2, 0.28]
    assert values(found, "loss.importance_sampling.level", "loss.importance_sampling.mode") == ["sequence", "mask"]
    assert "8 a device x 1 processes x 8 steps per generation = 64 completions a step" in render_lists(found.answers)
    assert imported("trl_grpo.yaml", "num_generations=8").answers.taken["rollout.prompts_per_step"].value == 8


def test_trl_command_lines() -> None:
    sft = imported("trl_sft.sh")
    assert values(sft, "data.batch_size", "data.max_tokens", "parallel.gpus") == [64, 2048, 4]
    assert values(sft, "model.lora.rank", "model.lora.targets", "data.train") == [
        8,
        ["q_proj", "v_proj"],
        "chats.jsonl",
    ]
    dpo = imported("trl_dpo.sh")
    assert values(dpo, "loss.kind", "loss.beta", "data.train") == ["ipo", 0.2, "owner/pairs.parquet"]
    assert "rpo_alpha" in dpo.answers.none


def test_trl_script_is_parsed_and_not_executed() -> None:
    found = imported("trl_script.py")
    assert values(found, "model.path", "optimizer.lr", "model.dtype") == ["Qwen/Qwen3-0.6B", 1e-5, "bfloat16"]
    assert values(found, "rollout.group_size", "rollout.max_new_tokens", "loss.kl.coefficient") == [16, 384, 0.01]
    assert values(found, "model.lora.rank", "model.lora.alpha", "rollout.temperature") == [8, 16, 0.7]
    assert "only known where it runs" in found.answers.none["output_dir"]
    assert values(found, "task.python.object", "task.file.scorer") == [f"{FILES / 'trl_script.py'}:length_reward", ...]
    assert "to do: move it to a file of its own" in found.answers.taken["task.python.object"].how


def test_several_files_of_verl_are_a_mix() -> None:
    files = ["data.train_files=[d/gsm8k/train.parquet,d/math/train.parquet]"]
    files.append("data.val_files=[d/math/test.parquet,d/gsm8k/test.parquet,d/aime.parquet]")
    found = imported("verl_plain.sh", *files)
    mix = found.config.task.mix
    assert mix is not None
    shown = {name: (one.file.train, one.file.held_out, one.file.scorer) for name, one in mix.items() if one.file}
    assert shown == {
        "gsm8k": ("d/gsm8k/train.parquet", "d/gsm8k/test.parquet", "gsm8k"),
        "math": ("d/math/train.parquet", "d/math/test.parquet", "math_verify"),
    }
    assert "d/aime.parquet" in found.answers.none["data.val_files"]
    assert "number of rows" in found.answers.taken["task.mix.math.weight"].how
    one = imported("verl_plain.sh", *files, "task.file.train=mine.parquet").config.task
    assert one.mix is None
    assert one.file is not None
    assert one.file.train == "mine.parquet"


def test_several_datasets_of_nemo_rl_are_a_mix() -> None:
    data = "[{dataset_name: owner/Maths-1.0},{data_path: codes.jsonl, env_name: code}]"
    mix = imported("nemo_base.yaml", f"data.train={data}").config.task.mix
    assert mix is not None
    shown = {name: (one.file.train, one.file.scorer, one.held_out) for name, one in mix.items() if one.file}
    assert shown == {"Maths-1_0": ("Maths-1.0.jsonl", "math_verify", 16), "codes": ("codes.jsonl", "exact", 16)}


def test_what_a_yaml_of_trl_is_for_can_be_said() -> None:
    assert imported("trl_grpo.yaml", "algorithm=sft").config.algorithm == "sft"
    with pytest.raises(UserError, match="choose one of"):
        imported("trl_grpo.yaml", "algorithm=kto")


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("num_generations: 4\n")
    with pytest.raises(UserError, match=r"names no model .`model_name_or_path`"):
        import_config(tmp_path / "x.yaml")
    assert import_config(tmp_path / "x.yaml", ["model.path=Qwen/Qwen3-0.6B"]).config.model.path == "Qwen/Qwen3-0.6B"
