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


def test_a_family_that_only_another_engine_computes_is_refused_with_its_name(tiny) -> None:
    loaded, config = family_model("diffllama"), tiny(LONGER)
    Policy(loaded, config).verify()
    said = "a layer calls attention more than once, or has no number"
    refusal = rf"paged engine cannot run `diffllama` \(.*({said}).*: set `rollout.engine: huggingface`"
    with pytest.raises(UserError, match=refusal):
        build_engine(loaded, config, lambda size: None)
    other = tiny({**LONGER, "rollout.engine": "huggingface"})
    assert sampled(build_engine(loaded, other, lambda size: None), loaded) < 1e-4


@pytest.mark.parametrize("name", ["phimoe", "doge", "phi3"])
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


def forgetful(forgotten):
    """A pass in which sequences do not see their first tokens, so many as `forgotten` returns for a chunk."""

    class Forgetful(_Pass):
        def __init__(self, chunks, *rest) -> None:
            super().__init__(chunks, *rest)
            self._forgotten = torch.tensor([forgotten(chunk) for chunk in chunks])[:, None, None]

        def attend(self, layer, query, key, value, scale, kind):
            class Blind(type(kind)):
                def sees(blind, rows, columns):
                    return super().sees(rows, columns) & (columns >= self._forgotten)

            return super().attend(layer, query, key, value, scale, Blind(**vars(kind)))

    return Forgetful


def test_a_shared_prompt_that_only_the_first_sample_sees_is_noticed(tiny, monkeypatch) -> None:
    def later_samples(chunk) -> int:
        later = isinstance(chunk.owner, ScheduledSample) and chunk.owner is not chunk.group.samples[0]
        return len(chunk.group.prompt) if later else 0

    monkeypatch.setattr(cpu_runner, "_Pass", forgetful(later_samples))
    with pytest.raises(UserError, match=r"log-probs are .* nats from the model's own"):
        build_engine(family_model("qwen2_moe"), tiny(LONGER), lambda size: None)


def test_a_chunk_of_a_prompt_that_does_not_see_the_one_before_is_noticed(tiny, monkeypatch) -> None:
    chunks = forgetful(lambda chunk: 0 if isinstance(chunk.owner, ScheduledSample) else chunk.first)
    monkeypatch.setattr(cpu_runner, "_Pass", chunks)
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


@pytest.mark.parametrize("engine", ["paged", "huggingface"])
@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_a_rope_that_follows_the_longest_sequence_is_right_or_refused(tiny, engine, name) -> None:
    """It changes past 16 tokens: up to these a sample does not depend on its neighbours, and no more are allowed."""
    loaded = family_model(name)
    config = {**LONGER, "rollout.engine": engine, "rollout.max_new_tokens": 9}
    with pytest.raises(UserError, match=f"the rope of `{name}` changes for all sequences .* lower"):
        build_engine(loaded, tiny(config), lambda size: None)
    right = build_engine(loaded, tiny({**config, "rollout.max_new_tokens": 8}), lambda size: None)
    prompts = [[*PROMPT, 4], [5, 6]]
    found = right.generate([Request(one, [1]) for one in prompts], SamplingParams(8, ignore_eos=True), lambda *_: None)
    for prompt, (sample,) in zip(prompts, found, strict=True):
        wanted = own_logprobs(loaded, prompt, sample.tokens)
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-5, rtol=1e-5)
