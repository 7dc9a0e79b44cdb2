"""Frozen reward models and classifiers on the run's own devices: a holding that the plan moves, and that scores
completions in the score phase."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from ebbtide.config.rewards import RewardModelConfig
from ebbtide.memory.residency import Residency
from ebbtide.model.classifier import read_classifier
from ebbtide.model.lora import base_digest
from ebbtide.policy.frozen import move_into_buckets
from ebbtide.progress import Progress, no_progress
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.reward_costs import REWARD_MODEL
from ebbtide.tasks.judgement import prompt_text
from ebbtide.tasks.score_message import ScoreResult, failed_score
from ebbtide.tasks.task import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Inputs = dict[str, list[int]]
    """A sequence: token ids, and for some models the kinds of tokens."""


class RewardModels:
    """All reward models of a run. They are the holding `reward_model`."""

    def __init__(self, configs: Sequence[RewardModelConfig], residency: Residency, day: str | None = None) -> None:
        """`day`: the date for chat templates that contain one."""
        self._residency = residency
        self._models: list[tuple[RewardModelConfig, _RewardModel]] = []
        digest, buckets = hashlib.sha256(), []
        for config in configs:
            model, tokenizer = read_classifier(config, residency.device)
            buckets += [*move_into_buckets(list(model.parameters()), residency.device)]
            model.to(residency.device)  # its buffers
            digest.update(base_digest(model).encode())
            encoder = Encoder(tokenizer, templated=True, day=day)
            self._models.append((config, _RewardModel(config, model, encoder, tokenizer)))
        self.digest = digest.hexdigest()
        """Of their weights: a run that is resumed with others says so."""
        residency.register(REWARD_MODEL, buckets, frozen=True)
        residency.offload_at_start(REWARD_MODEL)

    def score(
        self, config: RewardModelConfig, work: Sequence[tuple[Problem, str]], progress: Progress = no_progress
    ) -> list[float | ScoreResult]:
        """The score of each completion by one of the models, or why there is none."""
        self._residency.need(REWARD_MODEL)
        return next(model for one, model in self._models if one == config).score(work, progress)


class _RewardModel:
    """One model with its tokenizer."""

    def __init__(
        self,
        config: RewardModelConfig,
        model: PreTrainedModel,
        encoder: Encoder,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config, self._model, self._encoder, self._tokenizer = config, model, encoder, tokenizer
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        # A tokenizer without a limit has one of 10**30. RoBERTa's is right: two of its positions are for padding.
        limit = config.max_tokens or tokenizer.model_max_length
        self._longest = min(limit, context) if context else limit
        self._pad: int | None = model.config.get_text_config().pad_token_id

    def score(self, work: Sequence[tuple[Problem, str]], progress: Progress) -> list[float | ScoreResult]:
        found: list[float | ScoreResult] = []
        inputs: dict[int, Inputs] = {}
        for place, (problem, text) in enumerate(work):
            encoded = self._encode(problem, text)
            found.append(encoded if isinstance(encoded, ScoreResult) else 0.0)
            if not isinstance(encoded, ScoreResult):
                inputs[place] = encoded
        places, done = list(inputs), 0
        lengths = [len(inputs[place]["input_ids"]) for place in places]
        for rows in batches(lengths, self._config.batch_tokens):
            scores = self._forward([inputs[places[row]] for row in rows])
            for row, score in zip(rows, scores, strict=True):
                why = f"the output of `{self._config.path}` is {score}"
                found[places[row]] = score if isfinite(score) else failed_score("reward_model_error", why)
            done += len(rows)
            progress(done, len(work))
        return found

    def _encode(self, problem: Problem, text: str) -> Inputs | ScoreResult:
        """A prompt with its completion, by the model's own chat template; without one, as a pair of texts."""
        if self._encoder.is_templated:
            chat: list[Message] = [*problem.messages, {"role": "assistant", "content": text}]
            try:
                prepared = self._encoder.prepare_chat(chat, generation_prompt=False)
            except TemplateError as error:
                return failed_score(
                    "reward_model_error", f"the reward model's chat template refuses the messages: {error}"
                )
            inputs: Inputs = {"input_ids": self._encoder.tokenize([prepared])[0]}
        else:
            pair: Any = self._tokenizer(prompt_text(problem), text, split_special_tokens=True)
            inputs = {name: list(pair[name]) for name in ("input_ids", "token_type_ids") if name in pair}
        if not (count := len(inputs["input_ids"])):
            return failed_score("reward_model_error", "the prompt and the completion have no tokens")
        if count > self._longest:
            why = f"the prompt and the completion have {count} tokens, and the reward model takes {self._longest}"
            return failed_score("too_long", why)
        return inputs

    @torch.no_grad()
    def _forward(self, rows: Sequence[Inputs]) -> list[float]:
        if (pad := self._padding(rows)) is None:
            return [score for row in rows for score in self._forward([row])]
        for config in (self._model.config, self._model.config.get_text_config()):
            config.pad_token_id = pad
        longest, device = max(len(row["input_ids"]) for row in rows), self._model.device
        fill = {"input_ids": pad}
        batch = {
            name: torch.tensor([row[name] + [fill.get(name, 0)] * (longest - len(row[name])) for row in rows])
            for name in rows[0]
        }  # [rows, longest] each
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        logits = self._model(**{name: one.to(device) for name, one in batch.items()}).logits.float()  # [rows, labels]
        if self._config.transform == "sigmoid":
            logits = logits.sigmoid()
        elif self._config.transform == "softmax":
            logits = logits.softmax(-1)
        scores: list[float] = logits[:, self._config.label or 0].tolist()
        return scores

    def _padding(self, rows: Sequence[Inputs]) -> int | None:
        """The token that fills rows up, which a model skips to find the last one of each. Where its config names none,
        the last one is the last, whatever it is: so it is one that no row has; None: there is no such token."""
        if self._pad is not None:
            return self._pad
        used = {token for row in rows for token in row["input_ids"]}
        vocabulary = range(self._model.get_input_embeddings().weight.shape[0])
        found = next((token for token in vocabulary if token not in used), None)
        return found if found is not None or len(rows) > 1 else -1  # a single row needs none


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Rows of similar lengths, the longest first, with at most so many tokens together when they are padded."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if rows and ((len(rows) + 1) * lengths[rows[0]] > tokens):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
