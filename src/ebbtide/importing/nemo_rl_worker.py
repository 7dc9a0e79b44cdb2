"""NeMo RL's two workers, DTensor and Megatron: what they optimize with, and what they keep where."""

from __future__ import annotations

from math import isfinite
from typing import Any, get_args

from ebbtide.config.activation_rules import RECOMPUTED_ANYWAY
from ebbtide.config.memory import ActivationName
from ebbtide.importing.answers import Answers

PLANNED = "the plan decides it (`memory.plan`), for the GPU that the run has"

# Megatron's modules to recompute -> ours.
RECOMPUTED = {
    "core_attn": ["core_attn"],
    "moe_act": ["moe_act"],
    "layernorm": ["attn_norm", "mlp_norm"],
    "mlp": ["mlp_fc1", "mlp_act"],
    "moe": ["expert_fc1", "moe_act"],
}


def take_optimizer(answers: Answers, is_megatron: bool) -> None:
    """AdamW and its schedule."""
    clip = "policy.megatron_cfg.optimizer.clip_grad" if is_megatron else "policy.max_grad_norm"
    if clip in answers.source.keys:
        norm = answers.source.number(clip, 0.0)
        answers.take("optimizer.clip_norm", norm or None, clip, how="" if norm else "0 never clips")
    if is_megatron:
        _megatron_optimizer(answers)
        answers.drop("the Megatron worker has its own", *answers.source.under("policy.optimizer"))
        answers.drop("the Megatron worker has its own", "policy.scheduler", *answers.source.under("policy.scheduler"))
    else:
        _torch_optimizer(answers)


def _megatron_optimizer(answers: Answers) -> None:
    source, part, plan = answers.source, "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    rate = source.number(f"{part}.lr", 1e-6) or 1e-6
    answers.take("optimizer.lr", rate, f"{part}.lr")
    keys = [f"{part}.adam_beta1", f"{part}.adam_beta2"]
    answers.take("optimizer.betas", [source.number(keys[0], 0.9), source.number(keys[1], 0.999)], *keys)
    style, floor = str(source.get(f"{plan}.lr_decay_style", "constant")), source.number(f"{part}.min_lr", 0.0)
    if style in ("constant", "linear", "cosine"):
        answers.take("optimizer.schedule", style, f"{plan}.lr_decay_style")
    else:
        answers.lack(f"{plan}.lr_decay_style", "`optimizer.schedule`: constant, linear or cosine")
    if style != "constant":
        answers.take("optimizer.final_lr_fraction", min(1.0, max(0.0, floor / rate)), f"{part}.min_lr", f"{part}.lr")
        answers.drop("the learning rate decays until the last of `train.steps`", f"{plan}.lr_decay_iters")
    else:
        answers.drop("the learning rate does not decay", f"{part}.min_lr", f"{plan}.lr_decay_iters")
    _warmup(answers, source.number(f"{plan}.lr_warmup_iters", 0.0), f"{plan}.lr_warmup_iters", f"{plan}.lr_warmup_init")


def _torch_optimizer(answers: Answers) -> None:
    source, part = answers.source, "policy.optimizer.kwargs"
    rate = source.number(f"{part}.lr", 1e-6) or 1e-6
    answers.take("optimizer.lr", rate, f"{part}.lr")
    name = str(source.get("policy.optimizer.name", "torch.optim.AdamW"))
    if name.rpartition(".")[2] in ("AdamW", "Adam", "FusedAdam"):
        answers.drop("it is always AdamW", "policy.optimizer.name")
    else:
        answers.lack("policy.optimizer.name", "`optimizer` is AdamW")
    schedule = source.get("policy.scheduler")
    parts = schedule if isinstance(schedule, list) else _single(answers)
    decay, floor = "constant", 0.0
    for one in [part for part in parts if isinstance(part, dict) and "name" in part]:
        kind, given = str(one["name"]).rpartition(".")[2], one.get("kwargs")
        options = {key: _number(value) for key, value in given.items()} if isinstance(given, dict) else {}
        if kind == "LinearLR" and options.get("end_factor", 1.0) >= options.get("start_factor", 1.0):
            _warmup(answers, options.get("total_iters", 0.0), "policy.scheduler")
        elif kind == "LinearLR":
            decay, floor = "linear", options.get("end_factor", 0.0)
        elif kind == "CosineAnnealingLR":
            decay, floor = "cosine", options.get("eta_min", 0.0) / rate
        elif kind != "ConstantLR":
            answers.lack("policy.scheduler", f"`optimizer.schedule`: constant, linear or cosine, and no {kind}")
    theirs = ["policy.scheduler"] if isinstance(schedule, list) else source.under("policy.scheduler")
    answers.take("optimizer.schedule", decay, *theirs)
    if floor:
        answers.take("optimizer.final_lr_fraction", min(1.0, max(0.0, floor)), *theirs)


def _single(answers: Answers) -> list[dict[str, Any]]:
    """A scheduler that is a section instead of a list of them."""
    source, part = answers.source, "policy.scheduler"
    if source.get(f"{part}.name") is None:
        return []
    prefix = f"{part}.kwargs."
    options = {key.removeprefix(prefix): source.get(key) for key in source.keys if key.startswith(prefix)}
    return [{"name": source.get(f"{part}.name"), "kwargs": options}]


def _number(value: Any) -> float:
    """The number that a value is, also as a text; 0 where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if isfinite(number) else 0.0


def _warmup(answers: Answers, steps: float, key: str, *others: str) -> None:
    if steps >= 1:
        answers.take("optimizer.warmup_steps", int(steps), key, how="from 0, in optimizer steps")
    answers.drop("a warm-up starts from 0", key, *others)


def take_memory(answers: Answers, worker: str, is_megatron: bool) -> None:
    """What leaves the device, and what is recomputed."""
    source = answers.source
    if source.get("policy.offload_optimizer_for_logprob") is True:
        if source.algorithm == "grpo":
            answers.take("memory.offload.logprob", ["moments", "master"], "policy.offload_optimizer_for_logprob")
        else:
            answers.drop(PLANNED, "policy.offload_optimizer_for_logprob")
    if is_megatron:
        _cpu_optimizer(answers)
        _activations(answers)
    elif source.get(f"{worker}.cpu_offload") is True:
        answers.take("optimizer.place", "cpu", f"{worker}.cpu_offload", how="the weights stay on the device")


def _cpu_optimizer(answers: Answers) -> None:
    source, part = answers.source, "policy.megatron_cfg.optimizer"
    keys = [
        f"{part}.optimizer_cpu_offload",
        f"{part}.optimizer_offload_fraction",
        f"{part}.overlap_cpu_optimizer_d2h_h2d",
    ]
    if source.get(keys[0]) is not True:
        answers.drop("the optimizer is not offloaded: the plan decides (`optimizer.place`)", *keys)
        return
    fraction = source.number(keys[1], 1.0)
    if 0 < fraction < 1:
        answers.take("optimizer.place", "device", keys[0])
        answers.take("optimizer.cpu_fraction", fraction, keys[1])
    else:
        answers.take("optimizer.place", "cpu", keys[0], keys[1])
    answers.take("optimizer.overlap", source.get(keys[2], True) is True, keys[2])


def _activations(answers: Answers) -> None:
    source, part = answers.source, "policy.megatron_cfg"
    switch, modules = f"{part}.fine_grained_activation_offloading", f"{part}.offload_modules"
    if source.get(switch) is True:
        named = source.texts(modules)
        ours = [name for name in named if name in get_args(ActivationName) and name not in RECOMPUTED_ANYWAY]
        answers.drop("`memory.activations.offload` has the modules", switch)
        if ours:
            answers.take("memory.activations.offload", ours, switch, modules)
        if idle := [name for name in named if name not in ours]:
            nearest = "is not saved: blocks recompute it from its input anyway, or do not have it"
            answers.lack(modules, f"`memory.activations.offload`: {', '.join(idle)} {nearest}")
    else:
        answers.drop(PLANNED, switch, modules)
    keys = [f"{part}.activation_checkpointing", f"{part}.recompute_granularity", f"{part}.recompute_modules"]
    named = source.texts(keys[2]) or ["core_attn"]
    if source.get(keys[0]) is True and source.get(keys[1]) == "selective":
        ours = [module for name in named for module in RECOMPUTED.get(name, [])]
        ours = [module for module in dict.fromkeys(ours) if module not in _offloaded(answers)]
        if ours:
            answers.take("memory.activations.recompute", ours, *keys)
        if missing := [name for name in named if name not in RECOMPUTED]:
            answers.lack(keys[2], f"`memory.activations.recompute` has no {', '.join(missing)}")
    else:
        answers.drop(PLANNED, *keys)


def _offloaded(answers: Answers) -> list[str]:
    found = answers.taken.get("memory.activations.offload")
    return list(found.value) if found is not None else []
