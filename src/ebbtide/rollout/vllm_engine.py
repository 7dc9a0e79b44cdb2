"""The engine on vLLM, in this process: before every call the policy's weights are loaded into it, and between calls it
is in vLLM's sleep mode."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.config.rollout import VllmConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.device_budget import release_cache
from ebbtide.model.load import LoadedModel
from ebbtide.model.lora import merged_tensors
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Request, SamplingParams, diverged_error
from ebbtide.rollout.stopping import StopCondition
from ebbtide.system.transformers_internals import to_checkpoint_format

MIB = 1 << 20


class VllmEngine:
    def __init__(
        self, loaded: LoadedModel, config: Config, make_room: Callable[[int], None] = lambda size: None
    ) -> None:
        """`make_room` is called with the bytes of vLLM's memory before it is allocated again."""
        self._vllm = _import_vllm()
        self._model, self._tokenizer, self._make_room = loaded.model, loaded.tokenizer, make_room
        if loaded.model.device.type == "cpu" and any("experts" in name for name, _ in loaded.model.named_parameters()):
            # vLLM 0.32 packs experts for the CPU when it starts, and not again when their weights change.
            raise UserError(
                "`rollout.engine: vllm` cannot update the weights of experts on a CPU: use a GPU, or set"
                " `rollout.engine: paged`"
            )
        self._end_tokens = loaded.end_tokens
        self._settings = config.rollout.vllm or VllmConfig()
        self._tempered = config.has_temperature
        rollout = config.rollout
        ours = {
            "load_format": "dummy",
            "trust_remote_code": False,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            # One token more for `_plain_logprobs`.
            "max_model_len": rollout.max_prompt_tokens + rollout.max_new_tokens + self._tempered,
            "max_num_seqs": rollout.max_num_seqs,
            "gpu_memory_utilization": self._settings.memory_share,
            "enable_sleep_mode": self._settings.sleep_level > 0 and loaded.model.device.type == "cuda",
            "logprobs_mode": "processed_logprobs" if self._tempered else "raw_logprobs",
            "generation_config": "vllm",  # not the model's own: its repetition penalty and the like
        }
        if reserved := sorted(ours.keys() & self._settings.args.keys()):
            raise UserError(
                f"`rollout.vllm.args` names {', '.join(reserved)}, which Ebbtide sets itself from the rest of the"
                " config: remove it"
            )
        with _random_states_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = _model_folder(loaded)
            try:
                self._engine = self._vllm.LLM(str(folder), **ours, **self._settings.args).llm_engine
            except (TypeError, ValueError) as error:
                raise UserError(f"vLLM refuses this model or `rollout.vllm`: {' '.join(str(error).split())}") from None
        self._sleep()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        plain_only = sampling.temperature in (0, 1)
        cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        if cut if self._tempered else not plain_only:
            raise ValueError(
                f"vLLM was started for other log-probs than those of {sampling}: see `Config.has_temperature`"
            )
        samples = [(index, request.prompt, seed) for index, request in enumerate(requests) for seed in request.seeds]
        stop_condition = StopCondition(sampling, self._tokenizer, self._end_tokens)
        with self._awake():
            outputs = self._run([(prompt, self._params(sampling, seed)) for _, prompt, seed in samples], progress)
            sampled = [output.outputs[0] for output in outputs]
            logprobs = [list(done.logprobs.logprobs) for done in sampled]
            if not all(math.isfinite(value) for row in logprobs for value in row):
                raise diverged_error()
            plain = (
                logprobs
                if plain_only
                else self._plain_logprobs(
                    [(s[1], list(done.token_ids)) for s, done in zip(samples, sampled, strict=True)]
                )
            )
        groups: list[list[Completion]] = [[] for _ in requests]
        for (index, _, _), done, row, plain_row in zip(samples, sampled, logprobs, plain, strict=True):
            groups[index].append(
                stop_condition.completion(list(done.token_ids), row, plain_row, stopped=done.finish_reason == "stop")
            )
        return groups

    def _params(self, sampling: SamplingParams, seed: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=list(sampling.stop),
            ignore_eos=True,  # the end tokens are named below instead: vLLM's own may differ
            stop_token_ids=sampling.end_tokens(self._end_tokens),
            logprobs=0,  # for the sampled token only
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _plain_logprobs(self, samples: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Returns the log-probs of completions at temperature 1. vLLM prefills prompts with completions once more for
        them, since it gives one kind of log-probs at a time."""
        params = self._vllm.SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        outputs = self._run([(prompt + tokens, params) for prompt, tokens in samples], lambda done, of: None)
        return [
            output.prompt_logprobs.logprobs[-len(tokens) :]
            for output, (_, tokens) in zip(outputs, samples, strict=True)
        ]

    def _run(self, requests: Sequence[tuple[list[int], Any]], progress: Progress) -> list[Any]:
        for number, (prompt, params) in enumerate(requests):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        done: dict[int, Any] = {}
        while self._engine.has_unfinished_requests():
            done |= {int(output.request_id): output for output in self._engine.step() if output.finished}
            progress(len(done), len(requests))
        return [done[number] for number in range(len(requests))]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wakes vLLM up with the policy's weights. The KV cache is allocated after them, when the memory that loading
        needed is free again."""
        if self._settings.sleep_level:
            self._free_memory()
            self._engine.wake_up(["weights"])
        try:
            self._load_weights()
            if self._settings.sleep_level:
                self._engine.wake_up(["kv_cache"])
            if self._engine.reset_prefix_cache() is False:
                raise RuntimeError("vLLM kept what older weights computed: its prefix cache is still in use")
            yield
        finally:
            self._sleep()

    def _free_memory(self) -> None:
        """Makes room for vLLM's memory, which torch's allocator does not give: what that one keeps unused would be
        missing."""
        if self._model.device.type == "cuda":
            total = torch.cuda.get_device_properties(self._model.device).total_memory
            self._make_room(int(self._settings.memory_share * total))
            release_cache(self._model.device)

    def _load_weights(self) -> None:
        """Has vLLM load the policy's weights (weight sync)."""
        weights = checkpoint_weights(self._model, self._settings.bucket_mib * MIB)
        with torch.no_grad():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _sleep(self) -> None:
        if self._settings.sleep_level:
            # vLLM schedules ahead: a pass of samples that have ended may still write to the memory that is unmapped.
            if self._model.device.type == "cuda":
                torch.cuda.synchronize()
            self._engine.sleep(self._settings.sleep_level)


def _model_folder(loaded: LoadedModel) -> Path:
    """A folder with the policy's config and tokenizer. Its name depends on what is in it: vLLM compiles anew for a
    folder that it does not know."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ebbtide" / "vllm"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"`rollout.engine: vllm` keeps what vLLM is started from in {cache}, which cannot be written"
            f" ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from None
    with TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as new:
        shape = copy.deepcopy(loaded.model.config)
        shape.architectures = [type(loaded.model).__name__]
        # A GGUF file has one, and the policy's weights are not quantised.
        vars(shape).pop("quantization_config", None)
        shape.save_pretrained(new)
        loaded.tokenizer.save_pretrained(new)
        files = sorted(file for file in Path(new).rglob("*") if file.is_file())
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
        try:
            os.rename(new, cache / digest)
        except OSError:
            if not (cache / digest).is_dir():  # else it is there already
                raise
    return cache / digest


def checkpoint_weights(model: PreTrainedModel, bucket: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's tensors, with its adapters merged, with the names and shapes of a checkpoint's files. Those
    that have an adapter, or another shape there, such as experts, are copied, about `bucket` bytes at a time."""
    pending: dict[str, Tensor] = {}
    # The tensors of a layer stay together.
    for _, block in groupby(merged_tensors(model), lambda item: re.split(r"(?<=\d)\.", item[0], maxsplit=1)[0]):
        pending |= dict(block)
        if sum(tensor.nbytes for tensor in pending.values()) >= bucket:
            yield from to_checkpoint_format(model, pending).items()
            pending = {}
    yield from to_checkpoint_format(model, pending).items()


def _import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are passed as tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"`rollout.engine: vllm` needs the package vllm ({error}): pip install 'ebbtide[vllm]'"
        ) from None
    return vllm


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Keeps the states of all random generators: vLLM seeds every one of the process when it starts."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
