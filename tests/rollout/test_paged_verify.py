"""The paged engine is tried when it is built: a family that it does not compute is refused, with the engine that
does."""

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.policy.policy import Policy
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged import cpu_runner
from ebbtide.rollout.paged.cpu_runner import CpuRunner, _Pass
from ebbtide.rollout.paged.runner import PendingTokens
from ebbtide.rollout.paged.scheduler import ScheduledSample
from families import MIXED, OF, family_model, own_logprobs

LONGER = {"rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 16, "rollout.max_num_seqs": 8}
PROMPT = [3, 4, 5, 6, 7, 8, 9]


def sampled(engine, loaded) -> float:
    """How far the log-probs of a sample are from the model's own."""
    (group,) = engine.generate([Request(PROMPT, [1, 2])], SamplingParams(12, ignore_eos=True), lambda *_: None)
    own = [own_logprobs(loaded, PROMPT, one.tokens) for one in group]
    return max((torch.tensor(one.logprobs) - wanted).abs().max().item() for one, wanted in zip(group, own, strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("diffllama", "its 2 layers do not call attention once each"),
        ("jetmoe", "keys and values of 4 heads with 8 and 8 channels"),
        ("deepseek_v3", "with 16 and 8 channels"),
        ("gemma4_text", "its layers are of different sizes|with 16 and 16 channels"),
    ],
)
def test_a_family_that_only_another_engine_computes_is_refused_with_its_name(tiny, name, said) -> None:
    loaded, config = family_model(name), tiny(LONGER)
    Policy(loaded, config).verify()
    refusal = rf"paged engine cannot run `{name}` \(.*({said}).*: set `rollout.engine: huggingface`"
    with pytest.raises(UserError, match=refusal):
        build_engine(loaded, config, lambda size: None)
    other = tiny({**LONGER, "rollout.engine": "huggingface"})
    assert sampled(build_engine(loaded, other, lambda size: None), loaded) < 1e-4


@pytest.mark.parametrize("name", ["qwen2_moe", "gemma3n_text"])
def test_windows_and_shared_keys_are_those_of_the_models_own_forward(tiny, name) -> None:
    loaded = family_model(name)
    assert sampled(build_engine(loaded, tiny(LONGER), lambda size: None), loaded) < 1e-4


@pytest.mark.parametrize("name", ["phimoe", "falcon_h1", "phi3"])
def test_the_engine_needs_no_trainer_to_refuse(tiny, name) -> None:
    with pytest.raises(UserError, match=f"`{name}`"):
        build_engine(family_model(name, torch.bfloat16, spread=0.0), tiny(LONGER), lambda size: None)


def test_an_engine_that_computes_something_else_is_refused(tiny, monkeypatch) -> None:
    right = _Pass.attend
    monkeypatch.setattr(_Pass, "attend", lambda self, layer, query, *more: right(self, layer, query * 3, *more))
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(family_model("qwen2_moe"), tiny(LONGER), lambda size: None)


def test_an_engine_that_fails_is_refused_with_what_was_said(tiny, monkeypatch) -> None:
    def fail(self, *_: object) -> None:
        raise IndexError("no such slot")

    monkeypatch.setattr(_Pass, "attend", fail)
    said = r"cannot run `qwen2_moe` \(IndexError: no such slot\): set `rollout.engine: huggingface`"
    with pytest.raises(UserError, match=said):
        build_engine(family_model("qwen2_moe"), tiny(LONGER), lambda size: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_preempted_sample_whose_tokens_are_forgotten_is_seen(tiny, monkeypatch, dtype) -> None:
    """Its keys and values are not computed again: what its new blocks hold is another sequence's."""
    right = CpuRunner.prefill

    def forgets(self, chunks, ops):
        prompts = [pair for pair in zip(chunks, ops, strict=True) if not isinstance(pair[0].owner, ScheduledSample)]
        return right(self, *zip(*prompts, strict=True)) if prompts else PendingTokens([], lambda: ([], [], []))

    monkeypatch.setattr(CpuRunner, "prefill", forgets)
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(family_model("qwen2_moe", dtype), tiny(LONGER), lambda size: None)


def test_a_shared_prompt_that_only_the_first_sample_sees_is_noticed(tiny, monkeypatch) -> None:
    class Forgetful(_Pass):
        def __init__(self, chunks, *rest) -> None:
            super().__init__(chunks, *rest)
            for place, chunk in enumerate(chunks):
                if isinstance(chunk.owner, ScheduledSample) and chunk.owner is not chunk.group.samples[0]:
                    self._seen[place, :, : len(chunk.group.prompt)] = False

    monkeypatch.setattr(cpu_runner, "_Pass", Forgetful)
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(family_model("qwen2_moe"), tiny(LONGER), lambda size: None)


def test_a_chunk_of_a_prompt_that_does_not_see_the_one_before_is_noticed(tiny, monkeypatch) -> None:
    class Forgetful(_Pass):
        def __init__(self, chunks, *rest) -> None:
            super().__init__(chunks, *rest)
            for place, chunk in enumerate(chunks):
                if not isinstance(chunk.owner, ScheduledSample):
                    self._seen[place, :, : chunk.first] = False

    monkeypatch.setattr(cpu_runner, "_Pass", Forgetful)
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(family_model("qwen2_moe"), tiny(LONGER), lambda size: None)


def test_a_cap_that_only_the_engine_ignores_is_seen(tiny, monkeypatch) -> None:
    monkeypatch.setitem(OF, "gemma3_text", {**MIXED, "final_logit_softcapping": 30.0})
    loaded = family_model("gemma3_text")
    build_engine(loaded, tiny(LONGER), lambda size: None)
    monkeypatch.setattr(cpu_runner, "logit_scaling", lambda config: (1.0, None))
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(loaded, tiny(LONGER), lambda size: None)


def test_an_engine_in_which_sequences_mix_is_refused_even_where_it_looks_like_rounding(tiny, monkeypatch) -> None:
    right = _Pass.attend

    def mixes(self, *given):
        mixed = right(self, *given)
        return mixed + 0.01 * mixed.mean(0)

    monkeypatch.setitem(OF, "qwen3", {})
    monkeypatch.setattr(_Pass, "attend", mixes)
    with pytest.raises(UserError, match=r"log-probs of a sample move by .* nats when other prompts of the batch"):
        build_engine(family_model("qwen3", torch.bfloat16), tiny(LONGER), lambda size: None)
