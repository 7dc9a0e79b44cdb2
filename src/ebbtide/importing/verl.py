"""verl: the keys whose answer takes arithmetic, or depends on other keys."""

from __future__ import annotations

from ebbtide.errors import UserError
from ebbtide.importing import objective
from ebbtide.importing.answers import TODO, Answers
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
from ebbtide.importing.problems import take_file
from ebbtide.importing.verl_problems import ROLLOUT, files_of, take_problems

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ADVANTAGES = {
    "grpo": "group_std",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "group_std",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gpg": "group_mean",
    "opo": "group_mean",
    "grpo_passk": "group_std",
}
INEXACT = ("gpg", "opo", "grpo_passk")
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}


def answer(answers: Answers) -> None:
    """Answers what the table does not answer key by key."""
    if answers.source.algorithm == "sft":
        _supervised(answers)
        return
    source = answers.source
    _check_estimator(answers)
    take_model(answers, f"{MODEL}.path")
    if is_dense(answers.taken["model.path"].value):
        answers.drop("the model has no experts", *[key for key in source.keys if "moe_" in key])
    take_template_arguments(answers, "data.apply_chat_template_kwargs")
    _ranks(answers)
    _batch(answers)
    _steps(answers, "data.train_batch_size")
    take_problems(answers)
    _advantage(answers)
    _loss(answers)
    _correction(answers)
    _schedule(answers, f"{ACTOR}.optim")
    _memory(answers)
    _lora(answers, MODEL)
    _run(answers)


def _ranks(answers: Answers) -> None:
    source = answers.source
    keys = ["trainer.n_gpus_per_node", "trainer.nnodes"]
    megatron = f"{ACTOR}.megatron.tensor_model_parallel_size"
    gpus, rollout = source.size(keys[0], 8) * source.size(keys[1], 1), 0
    separate = ["rollout.n_gpus_per_node", "rollout.nnodes"]
    if separate[0] in source.keys:  # a trainer that generates on GPUs of its own
        rollout = source.count(separate[0], 0) * source.count(separate[1], 1)
        gpus, keys = gpus + rollout, [*keys, *separate]
    take_ranks(answers, gpus, rollout, source.size(megatron, 1), keys, megatron)


def _batch(answers: Answers) -> None:
    source = answers.source
    keys = ["data.train_batch_size", f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size"]
    prompts, group, update = source.size(keys[0], 1024), source.size(keys[1], 1), source.size(keys[2], 256)
    answers.take("rollout.prompts_per_step", prompts, keys[0])
    answers.take("rollout.group_size", group, keys[1])
    updates = take_updates(answers, prompts, update, "prompts", [keys[0], keys[2]])
    prompt, new = source.size("data.max_prompt_length", 512), source.size("data.max_response_length", 512)
    answers.take("rollout.max_prompt_tokens", prompt, "data.max_prompt_length")
    answers.take("rollout.max_new_tokens", new, "data.max_response_length")
    take_lengths(answers, prompt + new, ["data.max_prompt_length", "data.max_response_length"])
    ranks = int(answers.taken["parallel.gpus"].value) if "parallel.gpus" in answers.taken else 1
    ranks //= int(answers.taken["parallel.tensor"].value) if "parallel.tensor" in answers.taken else 1
    answers.arithmetic += [
        f"{prompts} prompts x {group} samples = {prompts * group} sequences a step",
        f"{prompts} prompts / {update} of an update = {updates} updates a step (`train.minibatches`)",
    ]
    micro = source.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0)
    tokens = source.count(f"{ACTOR}.ppo_max_token_len_per_gpu", 0)
    if source.get(f"{ACTOR}.use_dynamic_bsz") is True:
        answers.arithmetic.append(f"micro-batches of {tokens} tokens a GPU there; here the plan chooses their tokens")
    elif micro:
        steps = max(1, update * group // (micro * ranks))
        answers.arithmetic.append(
            f"{update} x {group} sequences of an update / ({micro} of a micro-batch x {ranks} data-parallel ranks) ="
            f" {steps} of gradient accumulation there; here the plan chooses the tokens of micro-batches"
        )


def _steps(answers: Answers, batch: str) -> None:
    source = answers.source
    steps, epochs = source.count("trainer.total_training_steps", 0), source.get("trainer.total_epochs")
    if steps > 0:
        answers.take("train.steps", steps, "trainer.total_training_steps")
        answers.drop("`trainer.total_training_steps` is set", "trainer.total_epochs")
    else:
        size = source.size(batch, 1024)
        how = f"{TODO} {epochs} epochs are {epochs} x rows / {size} steps"
        answers.take("train.steps", 100, "trainer.total_epochs", how=how)


def _check_estimator(answers: Answers) -> None:
    """Refuses what is another algorithm, with a value model or with further rollouts."""
    name = str(answers.source.get("algorithm.adv_estimator", "gae"))
    if name not in ADVANTAGES:
        exact = ", ".join(one for one in ADVANTAGES if one not in INEXACT)
        raise UserError(
            f"`algorithm.adv_estimator={name}` is not in Ebbtide"
            + (", which has no value model (critic)" if name == "gae" else "")
            + f": it has {exact}. `algorithm.adv_estimator=grpo` as an override imports it as that"
        )


def _advantage(answers: Answers) -> None:
    source, key = answers.source, "algorithm.adv_estimator"
    name = str(source.get(key, "gae"))
    kind = ADVANTAGES[name]
    objective.take_whitening(answers, kind)
    if kind == "group_std" and source.get("algorithm.norm_adv_by_std_in_grpo") is False:
        kind = "group_mean"
    take_advantage(answers, kind, key, "algorithm.norm_adv_by_std_in_grpo")
    if name in INEXACT:
        answers.lack(key, f"`advantage.kind: {kind}` is the nearest to `{name}`")


def _loss(answers: Answers) -> None:
    source = answers.source
    mode_key = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(source.get(mode_key, "vanilla"))
    if mode in ("gspo", "cispo"):
        answers.take("loss.kind", mode, mode_key)
    elif mode != "vanilla":
        answers.lack(mode_key, f"`loss.kind: grpo` is taken for `{mode}`; `module:function` is a loss of your own")
    low_key, high_key, both = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"
    for ours, key in (("loss.clip_low", low_key), ("loss.clip_high", high_key)):
        value = source.get(key, source.get(both))
        if mode == "cispo" and ours == "loss.clip_low" and value is not None:
            value = min(float(value), 1.0)
        answers.take(ours, value, key if key in source.keys else both)
    answers.drop("`clip_ratio_low` and `clip_ratio_high` are set", both)
    aggregation = str(source.get(f"{ACTOR}.loss_agg_mode", "token-mean"))
    if mode == "gspo":
        answers.drop("`gspo` weighs sequences", f"{ACTOR}.loss_agg_mode")
    else:
        answers.take("loss.normalise", AGGREGATIONS.get(aggregation, "constant"), f"{ACTOR}.loss_agg_mode")
    if aggregation not in AGGREGATIONS:
        answers.lack(f"{ACTOR}.loss_agg_mode", "`loss.normalise: constant` is the same up to a factor in the rate")
    objective.take_dual_clip(answers, f"{ACTOR}.clip_ratio_c")
    objective.take_dynamic_sampling(
        answers, "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"
    )
    for part in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        objective.take_overlong_buffer(answers, f"{part}.enable", f"{part}.len", f"{part}.penalty_factor")
    keys = [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
    coefficient = source.number(keys[1], 0.001)
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    in_reward = ["algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"]
    if source.get(keys[0]) is True and coefficient > 0:
        answers.take("loss.kl.coefficient", coefficient, keys[0], keys[1])
        name = str(source.get(keys[2], "low_var_kl")).rstrip("+")
        answers.take("loss.kl.estimator", kinds.get(name, "k3"), keys[2])
        if name not in kinds:
            answers.lack(keys[2], "`loss.kl.estimator`: k1, k2 or k3")
    elif source.get(in_reward[0]) is True:
        kind = kinds.get(str(source.get(in_reward[2], "kl")), "k1")
        objective.take_kl_in_reward(answers, in_reward[0], in_reward[1], in_reward[2], kind)
        answers.drop("the KL penalty is in the reward", *keys)
    else:
        answers.drop("without `loss.kl` there is no reference", *keys)
        answers.drop("there is no reference", *source.under("actor_rollout_ref.ref"))


def _correction(answers: Answers) -> None:
    """Importance sampling between the sampler's log-probs and the trainer's."""
    source, part, ours = answers.source, "algorithm.rollout_correction", "loss.importance_sampling"
    level, high = source.get(f"{part}.rollout_is"), source.number(f"{part}.rollout_is_threshold", 2.0)
    old = f"{ACTOR}.tis_imp_ratio_cap"
    if source.get(f"{part}.bypass_mode") is True:
        answers.take("loss.old_logprobs", "rollout", f"{part}.bypass_mode")
        if level in ("token", "sequence"):
            answers.lack(
                f"{part}.rollout_is", "`loss.old_logprobs: rollout`: the ratio is over the sampler's log-probs"
            )
    elif level in ("token", "sequence"):
        answers.take(f"{ours}.level", level, f"{part}.rollout_is")
        answers.take(f"{ours}.high", high, f"{part}.rollout_is_threshold")
    elif source.number(old, -1.0) > 0:
        answers.take(f"{ours}.high", source.number(old, 2.0), old)


def _schedule(answers: Answers, part: str) -> None:
    """Warm-up and decay. A warm-up as a fraction is of all optimizer steps."""
    source = answers.source
    steps, ratio = source.count(f"{part}.lr_warmup_steps", -1), source.number(f"{part}.lr_warmup_steps_ratio", 0.0)
    if steps > 0:
        answers.take("optimizer.warmup_steps", steps, f"{part}.lr_warmup_steps")
    elif ratio > 0:
        updates = int(answers.taken["train.steps"].value) * _updates(answers)
        how = f"{ratio:g} of {updates} optimizer steps"
        answers.take("optimizer.warmup_steps", round(ratio * updates), f"{part}.lr_warmup_steps_ratio", how=how)
    names = [f"{part}.lr_scheduler_type", f"{part}.warmup_style", f"{part}.lr_scheduler", f"{part}.lr_decay_style"]
    set_by = [key for key in names if source.get(key) is not None]
    given = [key for key in set_by if not source.keys[key].is_default] or set_by
    if given:
        kind = str(source.get(given[0]))
        if kind in ("constant", "linear", "cosine"):
            answers.take("optimizer.schedule", kind, given[0])
        else:
            answers.lack(given[0], "`optimizer.schedule`: constant, linear or cosine")
    if answers.taken.get("optimizer.schedule") and answers.taken["optimizer.schedule"].value != "constant":
        floor = source.number(f"{part}.min_lr_ratio", 0.0)
        answers.take("optimizer.final_lr_fraction", floor, f"{part}.min_lr_ratio")
    clip = f"{ACTOR}.grad_clip" if f"{ACTOR}.grad_clip" in source.keys else f"{part}.clip_grad"
    if clip in source.keys:
        answers.take("optimizer.clip_norm", source.number(clip, 1.0) or None, clip)


def _updates(answers: Answers) -> int:
    found = [answers.taken.get(key) for key in ("train.minibatches", "train.epochs")]
    return int(found[0].value if found[0] else 1) * int(found[1].value if found[1] else 1)


def _memory(answers: Answers) -> None:
    """verl loads what a phase needs and offloads the rest, by part; `lean` does so for all parts."""
    source = answers.source
    sections = [f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", "actor_rollout_ref.ref.fsdp_config"]
    sections.append("actor_rollout_ref.ref.megatron")
    names = ("param_offload", "optimizer_offload", "grad_offload")
    keys = [f"{section}.{name}" for section in sections for name in names]
    asked = [key for key in keys if source.get(key) is True]
    if asked:
        answers.take("memory.preset", "lean", *asked, how="all but the weights leaves the device in phases without it")
    answers.drop("off: the plan offloads what does not fit", *[key for key in keys if key not in asked])


def _lora(answers: Answers, part: str) -> None:
    source = answers.source
    nested = f"{part}.lora.rank" in source.keys
    keys = [f"{part}.lora.rank", f"{part}.lora.alpha"] if nested else [f"{part}.lora_rank", f"{part}.lora_alpha"]
    keys.append(f"{part}.lora.target_modules" if nested else f"{part}.target_modules")
    rank = source.count(keys[0], 0)
    if rank > 0:
        take_adapters(answers, rank, source.number(keys[1], 16), source.texts(keys[2]), keys)
        take_excluded(answers, f"{part}.exclude_modules")
    else:
        answers.drop("no adapters: all weights are trained", *keys)


def _run(answers: Answers) -> None:
    source = answers.source
    every = source.count("trainer.save_freq", -1)
    answers.take("checkpoint.every", every if every > 0 else None, "trainer.save_freq")
    loggers = source.get("trainer.logger", [])
    if "wandb" in str(loggers):
        answers.take("report.wandb.project", str(source.get("trainer.project_name", "verl")), "trainer.project_name")
    answers.drop("metrics.jsonl is always written", "trainer.logger", "trainer.project_name")
    if isinstance(name := source.get("trainer.experiment_name"), str):
        answers.take("run.name", name.replace("/", "-").replace(" ", "-"), "trainer.experiment_name")
    if source.get("trainer.resume_mode", "auto") == "resume_path" and source.get("trainer.resume_from_path"):
        answers.take("resume", str(source.get("trainer.resume_from_path")), "trainer.resume_from_path")


def _supervised(answers: Answers) -> None:
    """verl's SFT trainer."""
    source = answers.source
    take_model(answers, "model.partial_pretrain" if "model.partial_pretrain" in source.keys else "model.path")
    keys = ["torchrun.nproc_per_node", "torchrun.nnodes"]
    gpus = source.size(keys[0], source.count("trainer.n_gpus_per_node", 1))
    keys = keys if keys[0] in source.keys else ["trainer.n_gpus_per_node", "trainer.nnodes"]
    take_ranks(answers, gpus * source.size(keys[1], 1), 0, 1, keys, "")
    answers.take("data.batch_size", source.size("data.train_batch_size", 256), "data.train_batch_size")
    answers.take("data.max_tokens", source.size("data.max_length", 1024), "data.max_length")
    take_lengths(answers, source.size("data.max_length", 1024), ["data.max_length"])
    _steps(answers, "data.train_batch_size")
    columns = "with `prompt` and `completion`, or `messages`"
    take_file(answers, files_of(source.keys.get("data.train_files")), "data.train_files", "data.train", columns)
    if "data.val_files" in source.keys:
        take_file(answers, files_of(source.keys["data.val_files"]), "data.val_files", "data.held_out", columns)
    if source.count("trainer.test_freq", -1) > 0:
        answers.take("evaluate.every", source.count("trainer.test_freq", -1), "trainer.test_freq")
    truncation = {"error": "error", "right": "truncate", "left": "drop"}
    answers.take("data.overlong", truncation.get(str(source.get("data.truncation")), "error"), "data.truncation")
    _schedule(answers, "optim")
    _lora(answers, "model")
    _run(answers)
    answers.arithmetic.append(f"{answers.taken['data.batch_size'].value} examples a step, of all ranks together")
