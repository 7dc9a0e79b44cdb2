"""What the settings of all tools come down to: models, ranks, adapters, files and lengths, with the arithmetic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.importing.answers import TODO, Answers
from ebbtide.importing.source import Unread
from ebbtide.model.families import FAMILIES
from ebbtide.model.known import hub_id_of, known_models

DEFAULT_MICROBATCH_TOKENS = 16_384
OTHER_PARTS = ("vision_tower", "vision_model", "visual", "audio_tower", "multi_modal_projector")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of config.json


def take_model(answers: Answers, theirs: str, ours: str = "model.path") -> None:
    """The model's path. Where it is a folder that is not here, and the folder's name is that of a known model, it is
    that model's hub id."""
    found = answers.source.keys.get(theirs)
    if ours in answers.source.ours:
        answers.take(ours, answers.source.ours[ours].value, theirs, read=True)
        return
    if found is None or found.value in (None, ""):
        raise UserError(f"the file names no model (`{theirs}`): add an override, as in `{ours}=Qwen/Qwen3-0.6B`")
    text = str(found.value)
    name = os.path.basename(text.rstrip("/"))
    hub = hub_id_of(name)
    is_hub_id = text.count("/") == 1 and not text.startswith((".", "~", "/", "$"))
    if hub is not None and hub != text and not is_hub_id and not Path(os.path.expanduser(text)).exists():
        answers.take(ours, hub, theirs, how=f"`{text}` is not here: the hub id of that name")
    elif isinstance(found.value, Unread):
        answers.take(ours, text, theirs, how=f"{TODO} only known where it runs: name a folder or a hub id")
    else:
        answers.take(ours, text, theirs)


def take_template_arguments(answers: Answers, section: str) -> None:
    """Arguments of the chat template: a mapping, or the keys below it."""
    source, ours = answers.source, "model.chat_template_kwargs"
    whole, below = source.get(section), source.under(section)
    found = dict(whole) if isinstance(whole, dict) else {}
    found |= {key.removeprefix(f"{section}."): source.get(key) for key in below}
    if found:
        answers.take(ours, found, *(below or [section]))


def is_sparse(model: Any) -> bool:
    """Whether a model is known to be a mixture of experts."""
    return any(key in known_models().get(str(model), {}) for key in EXPERTS)


def is_dense(model: Any) -> bool:
    """Whether a model is known to have no experts."""
    return str(model) in known_models() and not is_sparse(model)


def take_ranks(
    answers: Answers, gpus: int, rollout_gpus: int, tensor: int, theirs: Sequence[str], tensor_key: str
) -> None:
    """Ranks: those that train, those that only generate, and how many of them share matrices."""
    train = gpus - rollout_gpus
    if train < 1:
        answers.lack(theirs[0], f"`parallel.gpus`: {gpus} GPUs less {rollout_gpus} that only generate leave none")
        train = 1
    if train + rollout_gpus == 1:
        answers.drop("one GPU: `parallel` is not set", *theirs, tensor_key)
        return
    answers.take("parallel.gpus", train, *theirs, how=f"{gpus} GPUs" if not rollout_gpus else "")
    if rollout_gpus:
        answers.take("parallel.rollout_gpus", rollout_gpus, *theirs)
    if tensor == 1:
        answers.drop("1 is the default of `parallel.tensor`", tensor_key)
    elif is_sparse(answers.taken["model.path"].value):
        answers.lack(tensor_key, "`parallel.data`: with experts, weights are sharded over all ranks (FSDP2) only")
    elif not _splits(answers.taken["model.path"].value):
        answers.lack(tensor_key, "`parallel.data`: this family is planned with weights sharded over all ranks (FSDP2)")
    elif train % tensor:
        answers.lack(tensor_key, f"`parallel.tensor`: {tensor} does not divide the {train} ranks that train")
    elif not _divides(answers.taken["model.path"].value, tensor):
        answers.lack(tensor_key, "`parallel.data`: the model's heads do not divide into so many parts")
    else:
        answers.take("parallel.tensor", tensor, tensor_key)


def _splits(model: Any) -> bool:
    """Whether a model may be of a family whose tensor parallelism is planned."""
    sizes = known_models().get(str(model))
    return sizes is None or sizes["model_type"] in FAMILIES


def _divides(model: Any, tensor: int) -> bool:
    sizes = known_models().get(str(model))
    return sizes is None or all(
        sizes[key] % tensor == 0 for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )


def take_updates(answers: Answers, samples: int, per_update: int, unit: str, theirs: Sequence[str]) -> int:
    """Updates a step: all of its samples (or prompts) by those of an update."""
    updates = max(1, round(samples / per_update)) if per_update else 1
    exact = per_update and samples == updates * per_update
    answers.take("train.minibatches", updates, *theirs, how=f"{samples} / {per_update} {unit}")
    if not exact:
        answers.lack(
            theirs[-1],
            f"`train.minibatches`: {samples} {unit} a step are no multiple of {per_update}: {updates} updates",
        )
    return updates


def take_lengths(answers: Answers, longest: int, theirs: Sequence[str]) -> None:
    """The size of micro-batches is the plan's choice; only where a sequence would not fit the default it is set."""
    if longest > DEFAULT_MICROBATCH_TOKENS:
        answers.take(
            "train.microbatch_tokens", longest, *theirs, how="one sequence must fit; the plan may not lower it"
        )


def take_adapters(answers: Answers, rank: int, alpha: float, targets: Sequence[str], keys: Sequence[str]) -> None:
    """LoRA: `keys` are those of rank, alpha and targets."""
    answers.take("model.lora.rank", rank, keys[0])
    answers.take("model.lora.alpha", alpha, keys[1])
    names = [name.strip(" ,").rpartition(".")[2] for name in targets]
    everything = {"all-linear", "all_linear", "linear", "*", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    if names and not set(names) & everything:
        answers.take("model.lora.targets", names, keys[2])
    else:
        answers.drop("all linear layers of the blocks are the default of `model.lora.targets`", keys[2])


def take_excluded(answers: Answers, key: str) -> None:
    """Layers without adapters. A pattern stands for the name inside it, and parts that see or hear are not trained."""
    names = [name.strip("*.").rpartition(".")[2] for name in answers.source.texts(key)]
    if left := [name for name in names if name not in OTHER_PARTS]:
        answers.take("model.lora.exclude", left, key)
    else:
        answers.drop("adapters are in the blocks of the language part only", key)


def take_evaluation(answers: Answers, every: int, every_key: str, problems: int | None, problems_key: str) -> None:
    """Evaluation of held-out problems; none where it is never due."""
    if every <= 0:
        answers.drop("never due: `evaluate` is not set", every_key, problems_key)
        return
    answers.take("evaluate.every", every, every_key)
    if problems:
        answers.take("evaluate.problems", problems, problems_key)
        answers.take("task.held_out", problems, problems_key)


def take_advantage(answers: Answers, kind: str, *theirs: str) -> None:
    """How rewards become advantages. A group of one sample has nothing to be compared with."""
    if kind != "reinforce_pp" and answers.taken["rollout.group_size"].value == 1:
        answers.lack(theirs[0], "`advantage.kind: reinforce_pp`, which compares with the batch: a group has one sample")
        kind = "reinforce_pp"
    answers.take("advantage.kind", kind, *theirs)
