"""An engine on vLLM, in this process: before every call it is given the policy's weights, and between calls it sleeps."""

from __future__ import annotations

import copy
import math
import os
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ebbtide.config.tree import Config, Vllm
from ebbtide.errors import UserError
from ebbtide.policy.model import Loaded
from ebbtide.progress import Progress
from ebbtide.rollout.ending import Ending
from ebbtide.rollout.engine import Completion, Request, Sampling, diverged

MIB = 1 << 20


class VllmEngine:
    def __init__(self, loaded: Loaded, config: Config) -> None:
        self._vllm = _import_vllm()
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        if loaded.model.device.type == "cpu" and any("experts" in name for name, _ in loaded.model.named_parameters()):
            raise UserError(  # vLLM 0.32 packs experts for the CPU when it starts, and not again when they change
                "`rollout.engine: vllm` cannot update the weights of experts on a CPU: use a GPU, or `rollout.engine: paged`"
            )
        self._end_tokens = loaded.end_tokens
        self._settings = config.rollout.vllm or Vllm()
        self._tempered = config.tempered
        rollout = config.rollout
        ours = {
            "load_format": "dummy",
            "trust_remote_code": False,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "max_model_len": rollout.max_prompt_tokens + rollout.max_new_tokens + self._tempered,  # one more for `_plain`
            "max_num_seqs": rollout.batch,
            "gpu_memory_utilization": self._settings.memory_share,
            "enable_sleep_mode": self._settings.sleep_level > 0 and loaded.model.device.type == "cuda",
            "logprobs_mode": "processed_logprobs" if self._tempered else "raw_logprobs",
            "generation_config": "vllm",  # without the model's own habits
        }
        if taken := sorted(ours.keys() & self._settings.args.keys()):
            raise UserError(
                f"`rollout.vllm.args` names {', '.join(taken)}, which Ebbtide sets itself from the rest of the config: remove it"
            )
        with TemporaryDirectory(prefix="ebbtide-vllm-") as folder, _random_states_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape = copy.deepcopy(loaded.model.config)
            shape.architectures = [type(loaded.model).__name__]
            vars(shape).pop("quantization_config", None)  # of a GGUF file: the policy's weights are no longer quantised
            shape.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
            try:
                self._engine = self._vllm.LLM(folder, **ours, **self._settings.args).llm_engine
            except (TypeError, ValueError) as error:
                raise UserError(f"vLLM refuses this model or `rollout.vllm`: {' '.join(str(error).split())}") from None
        self._sleep()

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        plain_only = sampling.temperature in (0, 1)
        cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        if cut if self._tempered else not plain_only:
            raise ValueError(f"vLLM was started for other log-probs than those of {sampling}: `Config.tempered` decides")
        samples = [(index, request.prompt, seed) for index, request in enumerate(requests) for seed in request.seeds]
        ending = Ending(sampling, self._tokenizer, self._end_tokens)
        with self._awake():
            outputs = self._run([(prompt, self._params(sampling, seed)) for _, prompt, seed in samples], progress)
            drawn = [output.outputs[0] for output in outputs]
            logprobs = [list(done.logprobs.logprobs) for done in drawn]
            if not all(math.isfinite(value) for row in logprobs for value in row):
                raise diverged()
            plain = logprobs if plain_only else self._plain([(s[1], list(done.token_ids)) for s, done in zip(samples, drawn, strict=True)])
        groups: list[list[Completion]] = [[] for _ in requests]
        for (index, _, _), done, row, plain_row in zip(samples, drawn, logprobs, plain, strict=True):
            groups[index].append(ending.completion(list(done.token_ids), row, plain_row, stopped=done.finish_reason == "stop"))
        return groups

    def _params(self, sampling: Sampling, seed: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=list(sampling.stop),
            ignore_eos=True,  # the end tokens are named instead: vLLM knows other ones
            stop_token_ids=[] if sampling.ignore_end else self._end_tokens,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _plain(self, samples: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probs at temperature 1 of prompts and completions: vLLM reads them once more, as prompts, since it gives one kind at a time."""
        params = self._vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self._run([(prompt + tokens, params) for prompt, tokens in samples], lambda done, of: None)
        return [output.prompt_logprobs.logprobs[-len(tokens) :] for output, (_, tokens) in zip(outputs, samples, strict=True)]

    def _run(self, asked: Sequence[tuple[list[int], Any]], progress: Progress) -> list[Any]:
        for number, (prompt, params) in enumerate(asked):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        done: dict[int, Any] = {}
        while self._engine.has_unfinished_requests():
            done |= {int(output.request_id): output for output in self._engine.step() if output.finished}
            progress(len(done), len(asked))
        return [done[number] for number in range(len(asked))]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """With the policy's weights. The cache comes back after them, when what their loading took is free again."""
        if self._settings.sleep_level:
            self._engine.wake_up(["weights"])
        weights = checkpoint_weights(self._model, self._settings.bucket_mib * MIB)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._settings.sleep_level:
            self._engine.wake_up(["kv_cache"])
        self._engine.reset_prefix_cache()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self._settings.sleep_level:
            self._engine.sleep(self._settings.sleep_level)


def checkpoint_weights(model: PreTrainedModel, bucket: int) -> Iterator[tuple[str, Tensor]]:
    """The model's own tensors, named and cut as in a checkpoint's files. What is cut anew, such as experts, is copied `bucket` bytes at a time."""
    held: dict[str, Tensor] = {}
    for _, block in groupby(model.state_dict().items(), lambda item: re.split(r"(?<=\d)\.", item[0], maxsplit=1)[0]):  # a layer stays whole
        held |= dict(block)
        if sum(tensor.nbytes for tensor in held.values()) >= bucket:
            yield from revert_weight_conversion(model, held).items()
            held = {}
    yield from revert_weight_conversion(model, held).items()


def _import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are handed over as tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"`rollout.engine: vllm` needs the package vllm ({error}): pip install 'ebbtide[vllm]'") from None
    return vllm


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process as it starts."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
