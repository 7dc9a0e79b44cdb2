"""NeMo RL: the keys whose answer takes arithmetic, or depends on other keys."""

from __future__ import annotations

from typing import Any

from ebbtide.importing import objective
from ebbtide.importing.answers import Answers
from ebbtide.importing.common import (
    is_dense,
    take_adapters,
    take_advantage,
    take_excluded,
    take_lengths,
    take_model,
    take_ranks,
    take_template_arguments,
    take_updates,
)
from ebbtide.importing.nemo_rl_problems import take_problems
from ebbtide.importing.nemo_rl_worker import take_memory, take_optimizer
from ebbtide.importing.problems import take_file

SECTIONS = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "distill": "distillation"}
KL_BETAS = {"forward": 0.0, "reverse": 1.0}


def answer(answers: Answers) -> None:
    """Answers what the table does not answer key by key."""
    source, section = answers.source, SECTIONS[answers.source.algorithm]
    take_model(answers, "policy.model_name")
    if source.get("policy.tokenizer.name") in (source.get("policy.model_name"), None):
        answers.drop("it is the model's own tokenizer", "policy.tokenizer.name")
    take_template_arguments(answers, "policy.tokenizer.chat_template_kwargs")
    is_megatron = source.get("policy.megatron_cfg.enabled") is True
    worker = "policy.megatron_cfg" if is_megatron else "policy.dtensor_cfg"
    answers.drop("Ebbtide has one worker: FSDP2, with tensor parallelism", f"{worker}.enabled")
    if is_dense(answers.taken["model.path"].value):
        answers.drop("the model has no experts", *[key for key in source.under(worker) if "moe_" in key])
    _ranks(answers, worker, is_megatron)
    if source.algorithm in ("grpo", "distill"):
        _rollouts(answers, section)
        take_problems(answers, section)
        _sampling(answers)
    else:
        _examples(answers, section)
    if source.algorithm == "grpo":
        _advantage(answers)
        _loss(answers)
    elif source.algorithm == "distill":
        take_model(answers, "teacher.model_name", "teacher.path")
        _divergence(answers)
    take_optimizer(answers, is_megatron)
    take_memory(answers, worker, is_megatron)
    _adapters(answers, worker, is_megatron)
    _checkpoints(answers)
    _reports(answers)


def _ranks(answers: Answers, worker: str, is_megatron: bool) -> None:
    source = answers.source
    node, nodes = source.size("cluster.gpus_per_node", 1), source.size("cluster.num_nodes", 1)
    theirs, colocated, rollout = ["cluster.gpus_per_node", "cluster.num_nodes"], "policy.generation.colocated", 0
    resources = [f"{colocated}.resources.gpus_per_node", f"{colocated}.resources.num_nodes"]
    if source.get(f"{colocated}.enabled") is False and source.algorithm in ("grpo", "distill"):
        rollout = source.count(resources[0], node) * source.count(resources[1], 1)
        theirs += [f"{colocated}.enabled", *resources]
    else:
        answers.drop(
            "ranks that train also generate, with the policy's own weights", f"{colocated}.enabled", *resources
        )
    tensor = f"{worker}.{'tensor_model_parallel_size' if is_megatron else 'tensor_parallel_size'}"
    take_ranks(answers, node * nodes, rollout, source.size(tensor, 1), theirs, tensor)
    if source.count(f"{worker}.dp_replicate_size", 1) > 1 and "parallel.gpus" in answers.taken:
        answers.take(
            "parallel.replicate", source.count(f"{worker}.dp_replicate_size", 1), f"{worker}.dp_replicate_size"
        )


def _rollouts(answers: Answers, section: str) -> None:
    """Prompts, samples, updates and lengths."""
    source = answers.source
    keys = [f"{section}.num_prompts_per_step", f"{section}.num_generations_per_prompt"]
    prompts, group = source.size(keys[0], 32), source.size(keys[1], 1)
    answers.take("rollout.prompts_per_step", prompts, keys[0])
    answers.take("rollout.group_size", group, keys[1])
    batch, micro = "policy.train_global_batch_size", "policy.train_micro_batch_size"
    update = source.size(batch, prompts * group)
    updates = take_updates(answers, prompts * group, update, "samples", [*keys, batch])
    answers.arithmetic += [
        f"{prompts} prompts x {group} samples = {prompts * group} sequences a step",
        f"{prompts * group} sequences / {update} of an update = {updates} updates a step (`train.minibatches`)",
        _accumulation(answers, update, source.size(micro, 1), "sequences"),
    ]
    _steps(answers, section, f"its epochs are rows / {prompts} steps each")
    answers.drop(
        "with one update a step the ratio is 1 already" if updates == 1 else "the ratio is that of the policies",
        "loss_fn.force_on_policy_ratio",
    )
    total = source.size("policy.max_total_sequence_length", 1024)
    new_key, prompt_key = "policy.generation.max_new_tokens", "data.max_input_seq_length"
    new, prompt = min(source.size(new_key, total), total), min(source.size(prompt_key, total), total)
    how = ""
    if new + prompt > total and new < total:
        prompt, how = total - new, f"{total} of a sequence, less {new} of a completion"
    elif new + prompt > total and prompt < total:
        new, how = total - prompt, f"{total} of a sequence, less {prompt} of a prompt"
    elif new + prompt > total:
        prompt = max(1, min(total // 4, 2048))
        new, how = (
            total - prompt,
            f"there a prompt and its completion share {total}: a quarter, at most 2048, to the prompt",
        )
    answers.take("rollout.max_prompt_tokens", prompt, prompt_key, "policy.max_total_sequence_length", how=how)
    answers.take("rollout.max_new_tokens", new, new_key, "policy.max_total_sequence_length", how=how)
    take_lengths(answers, prompt + new, ["policy.max_total_sequence_length"])


def _accumulation(answers: Answers, update: int, micro: int, unit: str) -> str:
    taken = answers.taken
    ranks = int(taken["parallel.gpus"].value) if "parallel.gpus" in taken else 1
    ranks //= int(taken["parallel.tensor"].value) if "parallel.tensor" in taken else 1
    steps = max(1, update // (micro * ranks))
    return (
        f"{update} {unit} of an update / ({micro} of a micro-batch x {ranks} data-parallel ranks) = {steps} of"
        " gradient accumulation there; here micro-batches are packed by tokens, as the plan chooses"
    )


def _steps(answers: Answers, section: str, epoch: str) -> None:
    source = answers.source
    steps, epochs = source.count(f"{section}.max_num_steps", 0), source.get(f"{section}.max_num_epochs")
    if steps > 0:
        how = f"or {epochs} epochs, if those are fewer: {epoch}" if epochs is not None else ""
        answers.take("train.steps", steps, f"{section}.max_num_steps", f"{section}.max_num_epochs", how=how)
    answers.drop("`train.steps` are set", f"{section}.max_num_epochs")


def _sampling(answers: Answers) -> None:
    """Asynchronous training has rollouts of older weights; here they are those of partial rollouts, on one rank."""
    source, section = answers.source, SECTIONS[answers.source.algorithm]
    enabled = f"{section}.async_grpo.enabled"
    if source.get(enabled) is not True:
        return
    prompts = int(answers.taken["rollout.prompts_per_step"].value)
    age = source.count(f"{section}.async_grpo.max_trajectory_age_steps", 1)
    if "parallel.gpus" in answers.taken:
        nearest = "`rollout.partial.extra_prompts`, on one rank; with `parallel`, generation and training take turns"
        for key in source.under(f"{section}.async_grpo"):
            answers.lack(key, nearest)
        return
    answers.take(
        "rollout.partial.extra_prompts", prompts * age, enabled, f"{section}.async_grpo.max_trajectory_age_steps"
    )
    recompute = f"{section}.async_grpo.recompute_kv_cache_after_weight_updates"
    answers.take("rollout.partial.kv_cache", "recompute" if source.get(recompute) else "keep", recompute)


def _examples(answers: Answers, section: str) -> None:
    """SFT and DPO: a file of examples or pairs."""
    source, batch = answers.source, "policy.train_global_batch_size"
    size = source.size(batch, 32)
    unit = "pairs" if section == "dpo" else "examples"
    answers.take("data.batch_size", size, batch)
    total = source.size("policy.max_total_sequence_length", 1024)
    answers.take("data.max_tokens", total, "policy.max_total_sequence_length")
    answers.take("data.overlong", "truncate", "policy.max_total_sequence_length", how="as NeMo RL does")
    longest = total * (2 if section == "dpo" else 1)
    take_lengths(answers, longest, ["policy.max_total_sequence_length"])
    answers.arithmetic.append(_accumulation(answers, size, source.size("policy.train_micro_batch_size", 1), unit))
    _steps(answers, section, f"an epoch is rows / {size} steps")
    path = "data.train.data_path" if source.get("data.train.data_path") else "data.train.dataset_name"
    if isinstance(source.get("data.train"), list):
        path = "data.train"
        answers.lack(path, "`data.train`: one file; join them")
    columns = "with `prompt`, `chosen` and `rejected`" if section == "dpo" else "with `messages`"
    take_file(answers, source.get(path, "train"), path, "data.train", columns)
    if source.get("data.validation.data_path"):
        take_file(answers, source.get("data.validation.data_path"), "data.validation.data_path", "data.held_out", "too")
    every = source.count(f"{section}.val_period", 0)
    keys = [f"{section}.val_batches", f"{section}.val_global_batch_size"]
    if every > 0:
        answers.take("evaluate.every", every, f"{section}.val_period")
        rows = source.count(keys[0], 1) * source.size(keys[1], 1)
        if rows > 0:
            answers.take("data.held_out_rows", rows, *keys, how=f"{source.get(keys[0])} x {source.get(keys[1])}")
    else:
        answers.drop("never due: `evaluate` is not set", f"{section}.val_period", *keys)


def _advantage(answers: Answers) -> None:
    source, part = answers.source, "grpo.adv_estimator"
    name = str(source.get(f"{part}.name", "grpo"))
    std = bool(source.get(f"{part}.normalize_rewards", source.get("grpo.normalize_rewards", True)))
    others = bool(
        source.get(f"{part}.use_leave_one_out_baseline", source.get("grpo.use_leave_one_out_baseline", False))
    )
    keys = [f"{part}.name", f"{part}.normalize_rewards", f"{part}.use_leave_one_out_baseline", f"{part}.minus_baseline"]
    keys += ["grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"]
    keys = [key for key in keys if key in source.keys]
    kind = "group_std" if std else "group_mean"
    if name.startswith("reinforce_plus_plus"):
        kind = "reinforce_pp_baseline" if source.get(f"{part}.minus_baseline") else "reinforce_pp"
    if kind == "group_mean" and others:
        kind = "rloo"
    objective.take_whitening(answers, kind)
    take_advantage(answers, kind, *keys)
    if name not in ("grpo", "reinforce_plus_plus"):
        answers.lack(f"{part}.name", f"`advantage.kind: {kind}` is the nearest to `{name}`")
    if kind == "group_std" and others:
        answers.lack(
            next(key for key in keys if "leave_one_out" in key),
            "`advantage.kind: group_std`: the baseline is the mean of the whole group, not of its other samples",
        )


def _loss(answers: Answers) -> None:
    source, part = answers.source, "loss_fn"
    if source.get(f"{part}.use_cispo") is True:
        answers.take("loss.kind", "cispo", f"{part}.use_cispo")
    elif source.get(f"{part}.sequence_level_importance_ratios") is True:
        answers.take("loss.kind", "gspo", f"{part}.sequence_level_importance_ratios")
    by_token = source.get(f"{part}.token_level_loss", True)
    if "loss.kind" in answers.taken and answers.taken["loss.kind"].value == "gspo":
        answers.drop("`gspo` weighs sequences", f"{part}.token_level_loss")
    else:
        answers.take("loss.normalise", "token" if by_token else "sequence", f"{part}.token_level_loss")
    kl = source.number(f"{part}.reference_policy_kl_penalty", 0.0)
    keys = [f"{part}.reference_policy_kl_penalty", f"{part}.reference_policy_kl_type"]
    if kl > 0 and source.get(f"{part}.use_kl_in_reward") is not True:
        answers.take("loss.kl.coefficient", kl, keys[0])
        answers.take("loss.kl.estimator", source.get(keys[1], "k3"), keys[1])
        approximated = f"{part}.use_on_policy_kl_approximation"
        objective.take_kl_ratio(answers, "rollout" if source.get(approximated) is True else "current", approximated)
    elif kl > 0:
        kind = str(source.get(keys[1], "k3"))
        objective.take_kl_in_reward(answers, f"{part}.use_kl_in_reward", keys[0], keys[1], kind)
    else:
        answers.drop("0: without `loss.kl` there is no reference", *keys)
    objective.take_dual_clip(answers, f"{part}.ratio_clip_c")
    objective.take_dynamic_sampling(answers, "grpo.use_dynamic_sampling", "grpo.dynamic_sampling_max_gen_batches")
    shaping = "grpo.reward_shaping"
    keys = [f"{shaping}.{name}" for name in ("enabled", "overlong_buffer_length", "overlong_buffer_penalty")]
    objective.take_overlong_buffer(answers, *keys)
    _correction(answers)


def _correction(answers: Answers) -> None:
    """Importance sampling between the sampler's log-probs and the trainer's."""
    source, part = answers.source, "loss_fn"
    kind_key, high_key = f"{part}.truncated_importance_sampling_type", f"{part}.truncated_importance_sampling_ratio"
    low_key, switch = f"{high_key}_min", f"{part}.use_importance_sampling_correction"
    if source.get(switch) is not True:
        answers.drop(f"`{switch}` is off", switch, kind_key, high_key, low_key)
        return
    high, kind = source.number(high_key, 0.0), str(source.get(kind_key, "tis"))
    ours = "loss.importance_sampling"
    answers.take(f"{ours}.high", high or 1e6, switch, high_key, how="" if high else "it is not truncated there")
    is_gspo = answers.taken.get("loss.kind") is not None and answers.taken["loss.kind"].value == "gspo"
    level = "geometric" if kind == "seq-mask-tis" else "sequence" if is_gspo else "token"
    answers.take(f"{ours}.level", level, kind_key)
    answers.take(f"{ours}.mode", {"icepop": "mask", "seq-mask-tis": "mask"}.get(kind, "truncate"), kind_key)
    if kind == "seq-mask-tis":
        answers.lack(
            kind_key, f"`{ours}`: masked by the geometric mean, which is then the weight as well, not the token's"
        )
    low = source.number(low_key, 0.0)
    if low > 0 and kind in ("icepop", "seq-mask-tis"):
        answers.take(f"{ours}.low", low, low_key)


def _divergence(answers: Answers) -> None:
    source = answers.source
    kind = str(source.get("loss_fn.kl_type", "reverse"))
    weight = source.number("loss_fn.mixed_kl_weight", 0.5)
    answers.take("loss.beta", KL_BETAS.get(kind, 1 - weight), "loss_fn.kl_type", "loss_fn.mixed_kl_weight")
    if kind == "mixed":
        answers.lack("loss_fn.kl_type", "`loss.beta`: between 0 and 1 it is the JSD, not a sum of both KLs")
    teacher = source.get("teacher.model_name")
    if teacher is not None:
        answers.drop("the teacher is placed by the plan, like the policy", *source.under("teacher"))


def _adapters(answers: Answers, worker: str, is_megatron: bool) -> None:
    part = f"{worker}.{'peft' if is_megatron else 'lora_cfg'}"
    source = answers.source
    if source.get(f"{part}.enabled") is not True:
        return
    keys = [f"{part}.dim", f"{part}.alpha", f"{part}.target_modules"]
    targets = [] if source.get(f"{part}.match_all_linear") is True else source.texts(keys[2])
    take_adapters(answers, source.size(keys[0], 8), source.number(keys[1], 32), targets, keys)
    take_excluded(answers, f"{part}.exclude_modules")
    answers.drop("`model.lora` is there", f"{part}.enabled", f"{part}.match_all_linear")


def _checkpoints(answers: Answers) -> None:
    source, part = answers.source, "checkpointing"
    if source.get(f"{part}.enabled") is False:
        answers.take("checkpoint", None, f"{part}.enabled")
        answers.drop("no checkpoints are written", *source.under(part), *source.under("policy.megatron_cfg.checkpoint"))
        return
    answers.drop("`checkpoint` is there by default", f"{part}.enabled")
    metric, higher = str(source.get(f"{part}.metric_name", "")), source.get(f"{part}.higher_is_better", True)
    keys = [f"{part}.metric_name", f"{part}.higher_is_better"]
    if (
        answers.source.algorithm == "grpo"
        and metric.startswith("val:")
        and "evaluate.every" in answers.taken
        and higher
    ):
        answers.take("checkpoint.metric", "evaluate/reward", *keys, how=f"`{metric}` there")
    deadline = source.get(f"{part}.checkpoint_must_save_by")
    if deadline is not None:
        parts = [float(one) for one in str(deadline).split(":") if one.replace(".", "").isdigit()]
        minutes = sum(one * size for one, size in zip(reversed(parts), (1 / 60, 1, 60, 1440), strict=False))
        answers.take(
            "checkpoint.deadline_minutes", minutes, f"{part}.checkpoint_must_save_by", how="days:hours:minutes:seconds"
        )


def _reports(answers: Answers) -> None:
    source = answers.source
    if source.get("logger.wandb_enabled") is True:
        answers.take("report.wandb.project", source.get("logger.wandb.project", "nemo-rl"), "logger.wandb.project")
        name = source.get("logger.wandb.name")
        if name:
            answers.take("run.name", _plain(name), "logger.wandb.name")
    answers.drop(
        "`report.wandb` is on where it is set", "logger.wandb_enabled", "logger.wandb.project", "logger.wandb.name"
    )


def _plain(name: Any) -> str:
    """A name that a folder can have."""
    return str(name).replace("/", "-").replace(" ", "-")
