"""TRL: the keys whose answer takes arithmetic, or depends on other keys."""

from __future__ import annotations

from typing import Any

from ebbtide.importing import objective
from ebbtide.importing.answers import TODO, Answers
from ebbtide.importing.common import (
    take_adapters,
    take_advantage,
    take_excluded,
    take_lengths,
    take_model,
    take_ranks,
    take_template_arguments,
)
from ebbtide.importing.problems import take_file
from ebbtide.importing.trl_rewards import take_scorers

LOSSES = {"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant"}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
PROMPT_TOKENS = 512  # TRL has no limit of its own: Ebbtide's default


def answer(answers: Answers) -> None:
    """Answers what the table does not answer key by key."""
    source = answers.source
    take_model(answers, "model_name_or_path")
    take_ranks(answers, source.size("accelerate.num_processes", 1), 0, 1, ["accelerate.num_processes"], "")
    ranks = source.size("accelerate.num_processes", 1)
    if source.algorithm == "grpo":
        updates = _rollouts(answers, ranks)
        _problems(answers)
        _loss(answers)
        _correction(answers)
    else:
        updates = 1
        _examples(answers, ranks)
    _steps(answers, updates)
    _schedule(answers, updates)
    take_template_arguments(answers, "chat_template_kwargs")
    _dtype(answers)
    _adapters(answers)
    _run(answers)


def _rollouts(answers: Answers, ranks: int) -> int:
    """Completions a step, and the updates that are made of them."""
    source = answers.source
    device, accumulation = (
        source.size("per_device_train_batch_size", 8),
        source.size("gradient_accumulation_steps", 1),
    )
    group = source.size("num_generations", 8)
    generations = source.size("steps_per_generation", accumulation)
    size = source.size("generation_batch_size", device * ranks * generations)
    if "generation_batch_size" in source.keys:
        generations = max(1, size // (device * ranks))
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"]
    keys = [key for key in [*keys, "generation_batch_size", "accelerate.num_processes"] if key in source.keys]
    prompts = max(1, size // group)
    how = f"{device} x {ranks} processes x {generations} = {size} completions / {group}"
    answers.take("rollout.prompts_per_step", prompts, *keys, how=how)
    answers.take("rollout.group_size", group, "num_generations")
    if prompts * group != size:
        answers.lack("num_generations", f"`rollout.group_size`: {size} completions are no multiple of {group}")
    minibatches = max(1, round(generations / accumulation))
    answers.take("train.minibatches", minibatches, *keys, how=f"{generations} / {accumulation}")
    epochs = source.size("num_iterations", 1)
    answers.take("train.epochs", epochs, "num_iterations")
    answers.arithmetic += [
        f"{device} a device x {ranks} processes x {generations} steps per generation = {size} completions a step",
        f"{size} completions / {group} generations = {prompts} prompts (`rollout.prompts_per_step`)",
        f"{generations} steps per generation / {accumulation} of gradient accumulation = {minibatches} updates a step,"
        f" x {epochs} iterations; here micro-batches are packed by tokens, as the plan chooses",
    ]
    new = source.size("max_completion_length", 512)
    prompt_key = "max_prompt_length"
    prompt = source.size(prompt_key, PROMPT_TOKENS)
    how = "" if prompt_key in source.keys else "TRL limits no prompt: Ebbtide's default"
    answers.take("rollout.max_prompt_tokens", prompt, *([prompt_key] if prompt_key in source.keys else []), how=how)
    answers.take("rollout.max_new_tokens", new, "max_completion_length")
    take_lengths(answers, prompt + new, ["max_completion_length"])
    return minibatches * epochs


def _problems(answers: Answers) -> None:
    source = answers.source
    found = source.keys.get("dataset_name")
    columns = "with a field `prompt`, and one of answers"
    take_file(answers, "train" if found is None else found.value, "dataset_name", "task.file.train", columns)
    take_scorers(answers)
    environment = next((key for key in ("environment_factory", "rollout_func", "tools") if key in source.keys), None)
    if environment is not None:
        answers.lack(
            environment, "`task.environment`, whose object is `module:name` of a class like that (docs/tools.md)"
        )
    every = source.number("eval_steps", 0.0)
    if source.get("eval_strategy", "no") == "steps" and every >= 1:
        answers.take("evaluate.every", int(every), "eval_steps", "eval_strategy")
    else:
        answers.drop("`evaluate` is not set", "eval_steps", "eval_strategy", "num_generations_eval")


def _examples(answers: Answers, ranks: int) -> None:
    """SFT, DPO and GKD: a file of examples or pairs."""
    source = answers.source
    device, accumulation = (
        source.size("per_device_train_batch_size", 8),
        source.size("gradient_accumulation_steps", 1),
    )
    size = device * accumulation * ranks
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps", "accelerate.num_processes"]
    keys = [key for key in keys if key in source.keys]
    how = f"{device} x {accumulation} x {ranks} processes"
    answers.take("data.batch_size", size, *keys, how=how)
    answers.arithmetic.append(
        f"{device} a device x {accumulation} of gradient accumulation x {ranks} processes = {size} examples an update"
    )
    longest = source.size("max_length", 1024)
    answers.take("data.max_tokens", longest, "max_length")
    answers.take("data.overlong", "truncate", "max_length", how="as TRL does")
    take_lengths(answers, longest * (2 if source.algorithm == "dpo" else 1), ["max_length"])
    columns = "with `prompt`, `chosen` and `rejected`" if source.algorithm == "dpo" else "with `messages`, or `text`"
    found = source.keys.get("dataset_name")
    take_file(answers, "train" if found is None else found.value, "dataset_name", "data.train", columns)
    if source.algorithm == "distill":
        take_model(answers, "teacher_model_name_or_path", "teacher.path")
        if source.number("lmbda", 0.5) > 0:
            answers.lack(
                "lmbda", "`data`, a file of completions (lmbda 0), or `task`, completions of the policy (lmbda 1)"
            )
    every = source.number("eval_steps", 0.0)
    if source.get("eval_strategy", "no") == "steps" and every >= 1:
        answers.take("evaluate.every", int(every), "eval_steps", "eval_strategy")
    else:
        answers.drop("`evaluate` is not set", "eval_steps", "eval_strategy")


def _steps(answers: Answers, updates: int) -> None:
    """TRL counts optimizer steps; a step of RL here has several of them."""
    source = answers.source
    steps = source.count("max_steps", -1)
    if steps > 0:
        how = f"{steps} optimizer steps / {updates} a step" if updates > 1 else ""
        answers.take("train.steps", max(1, steps // updates), "max_steps", how=how)
        answers.drop("`max_steps` is set", "num_train_epochs")
        return
    rows = answers.taken.get("rollout.prompts_per_step") or answers.taken["data.batch_size"]
    epochs = source.get("num_train_epochs", 3)
    how = f"{TODO} {epochs} epochs are {epochs} x rows / {rows.value} steps"
    answers.take("train.steps", 100, "num_train_epochs", how=how)
    answers.drop("epochs are set", "max_steps")


def _schedule(answers: Answers, updates: int) -> None:
    source = answers.source
    kind = str(source.get("lr_scheduler_type", "linear"))
    if kind in SCHEDULES:
        answers.take("optimizer.schedule", SCHEDULES[kind], "lr_scheduler_type")
    elif kind == "cosine_with_min_lr":
        answers.take("optimizer.schedule", "cosine", "lr_scheduler_type")
    else:
        answers.lack("lr_scheduler_type", "`optimizer.schedule`: constant, linear or cosine")
    options = source.get("lr_scheduler_kwargs", {})
    if isinstance(options, dict) and "min_lr_rate" in options:
        answers.take("optimizer.final_lr_fraction", options["min_lr_rate"], "lr_scheduler_kwargs")
    warm, ratio = source.number("warmup_steps", 0.0), source.number("warmup_ratio", 0.0)
    if 0 < warm < 1:  # a fraction, in newer versions
        warm, ratio = 0.0, warm
    key = "warmup_steps" if "warmup_steps" in source.keys else "warmup_ratio"
    if warm >= 1:
        answers.take("optimizer.warmup_steps", int(warm), "warmup_steps")
    elif ratio > 0:
        total = int(answers.taken["train.steps"].value) * updates
        how = f"{ratio:g} of {total} optimizer steps"
        answers.take("optimizer.warmup_steps", round(ratio * total), key, how=how)
    betas = ["adam_beta1", "adam_beta2"]
    if any(key in source.keys for key in betas):
        answers.take("optimizer.betas", [source.number(betas[0], 0.9), source.number(betas[1], 0.999)], *betas)
    clip = source.number("max_grad_norm", 1.0)
    answers.take("optimizer.clip_norm", clip or None, "max_grad_norm")


def _loss(answers: Answers) -> None:
    source = answers.source
    kind, level = str(source.get("loss_type", "dapo")), str(source.get("importance_sampling_level", "token"))
    is_gspo = level == "sequence"
    if is_gspo:
        answers.take("loss.kind", "gspo", "importance_sampling_level")
        if kind != "grpo":
            answers.lack("loss_type", "`loss.kind: gspo` weighs sequences alike (`loss_type=grpo`)")
        else:
            answers.drop("`gspo` weighs sequences alike", "loss_type")
    elif kind == "cispo":
        answers.take("loss.kind", "cispo", "loss_type")
    elif kind in LOSSES:
        answers.take("loss.normalise", LOSSES[kind], "loss_type")
    else:
        answers.lack("loss_type", "`loss.kind: grpo` is taken; `module:function` is a loss of your own")
    epsilon = source.number("epsilon", 0.2)
    if kind == "cispo":
        answers.drop("`cispo` has an upper bound only", "epsilon")
    else:
        answers.take("loss.clip_low", epsilon, "epsilon")
    high = "epsilon_high" if source.get("epsilon_high") is not None else "epsilon"
    value = source.number(high, epsilon)
    if kind == "cispo" and high == "epsilon_high":
        value = max(value - 1, 1e-3)
        answers.take("loss.clip_high", value, high, how="TRL's bound is of the ratio itself, less 1")
    elif kind != "cispo":
        answers.take("loss.clip_high", value, high)
    if (beta := source.number("beta", 0.0)) > 0:
        answers.take("loss.kl.coefficient", beta, "beta")
        corrected = source.get("use_bias_correction_kl") is True
        objective.take_kl_ratio(answers, "old" if corrected else None, "use_bias_correction_kl")
    else:
        answers.drop("0: without `loss.kl` there is no reference", "beta")
    objective.take_dual_clip(answers, "delta")
    scale = str(source.get("scale_rewards", "group")).lower()
    names = {"group": "group_std", "true": "group_std", "none": "group_mean", "false": "group_mean"}
    kind = "rloo" if source.get("trainer") == "rloo" else names.get(scale, "group_std")
    theirs = ["scale_rewards"] if "scale_rewards" in source.keys else ["num_generations"]
    take_advantage(answers, kind, *theirs)
    if scale not in names and kind != "rloo":
        answers.lack("scale_rewards", "`advantage.kind: group_std`, by the group's standard deviation, not the batch's")


def _correction(answers: Answers) -> None:
    """Importance sampling between vLLM's log-probs and the trainer's."""
    source, part, ours = answers.source, "vllm_importance_sampling", "loss.importance_sampling"
    keys = [f"{part}_correction", f"{part}_mode", f"{part}_clip_max", f"{part}_clip_min", f"{part}_cap"]
    if source.get("use_vllm") is not True or source.get(keys[0], True) is False:
        answers.drop("without vLLM, or switched off, there is no correction there", *keys)
        return
    level, mode = MODES.get(str(source.get(keys[1], "sequence_mask")), ("sequence", "mask"))
    cap = keys[4] if source.get(keys[4]) is not None else keys[2]
    answers.take(f"{ours}.level", level, keys[1])
    answers.take(f"{ours}.mode", mode, keys[1])
    answers.take(f"{ours}.high", source.number(cap, 3.0), cap)
    if (low := source.number(keys[3], 0.0)) > 0:
        answers.take(f"{ours}.low", low, keys[3])
    elif mode == "mask":
        answers.take(f"{ours}.low", 1e-6, keys[1], how="TRL has no lower bound")
    answers.drop("`loss.importance_sampling` is there", *keys)


def _dtype(answers: Answers) -> None:
    """The type of the weights. The trainer's `bf16` over fp32 weights is bfloat16 with masters here."""
    source = answers.source
    key = next((one for one in ("dtype", "torch_dtype", "bf16") if source.get(one) is not None), None)
    options = source.get("model_init_kwargs", {})
    value: Any = source.get(key) if key else None
    if key is None and isinstance(options, dict) and "dtype" in options:
        key, value = "model_init_kwargs", options["dtype"]
    if key is None:
        return
    text = str(value).rpartition(".")[2]
    if text in ("bfloat16", "True"):
        answers.take("model.dtype", "bfloat16", key, how="with fp32 masters in the optimizer")
    elif text == "float32":
        answers.take("model.dtype", "float32", key)
    elif text == "float16":
        answers.lack(key, "`model.dtype: bfloat16` has the range of float32")


def _adapters(answers: Answers) -> None:
    source = answers.source
    keys = ["lora_r", "lora_alpha", "lora_target_modules"]
    if source.get("use_peft") is not True:
        answers.drop("no adapters: all weights are trained", "use_peft", *keys)
        return
    answers.drop("`model.lora` is there", "use_peft")
    take_adapters(answers, source.size(keys[0], 16), source.number(keys[1], 32), source.texts(keys[2]), keys)
    take_excluded(answers, "lora_exclude_modules")
    if source.get("load_in_4bit") is True or source.get("load_in_8bit") is True:
        key = "load_in_4bit" if source.get("load_in_4bit") is True else "load_in_8bit"
        if "parallel.gpus" in answers.taken:
            answers.lack(key, "`model.base`, on one rank")
        else:
            answers.take("model.base", "int4" if key == "load_in_4bit" else "float8", key)


def _run(answers: Answers) -> None:
    source = answers.source
    steps = source.number("save_steps", 500.0)
    if source.get("save_strategy") == "no":
        answers.take("checkpoint.every", None, "save_strategy")
        answers.drop("none is written along the way", "save_steps")
    elif steps >= 1 and "save_steps" in source.keys:
        answers.take("checkpoint.every", int(steps), "save_steps")
    else:
        answers.drop("`checkpoint.every` has its default", "save_steps", "save_strategy")
    if "wandb" in str(source.get("report_to", "")):
        name = str(source.get("project", source.get("run_name", "trl")))
        answers.take("report.wandb.project", name, "report_to")
    if isinstance(name := source.get("run_name"), str):
        answers.take("run.name", name.replace("/", "-").replace(" ", "-"), "run_name")
