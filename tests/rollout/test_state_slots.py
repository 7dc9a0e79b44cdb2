"""Models with states in the paged engine: what is sampled has the log-probs of the model's own forward, whatever is
shared, cut into chunks, preempted, parked or suspended."""

import random
import weakref

import pytest
import torch

from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.model.row_adapters import join_adapters, row_adapters, take_adapters
from ebbtide.model.state_layers import state_layers
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged import cache_costs
from ebbtide.rollout.paged.engine import PagedEngine
from families import family_model, own_logprobs
from state_families import KINDS, STATES

PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [8], [9, 3, 8, 4, 7, 5, 6])


def _check(loaded, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    own = own_logprobs(loaded, prompt, tokens)
    assert (own - torch.tensor(logprobs)).abs().mean() <= 1e-5


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("tight", [False, True], ids=["room", "tight"])
def test_samples_have_the_models_own_logprobs(name, tight) -> None:
    loaded = family_model(name)
    engine = PagedEngine(loaded, 6, block=4, ahead=tight, **({"blocks": 10, "chunk": 5} if tight else {}))
    requests = [Request(prompt, [1, 2, 3]) for prompt in PROMPTS]
    found = engine.generate(requests, SamplingParams(9, ignore_eos=True), lambda *_: None)
    assert bool(engine.preempted) == tight
    for request, group in zip(requests, found, strict=True):
        for one in group:
            _check(loaded, list(request.prompt), one.tokens, one.plain_logprobs)


@pytest.mark.parametrize("name", KINDS)
def test_turns_continue_from_the_state(name) -> None:
    """What is appended between turns is computed from the state on, also after a state was given up."""
    loaded, chance = family_model(name), random.Random(2)
    engine = PagedEngine(loaded, 3, block=4, blocks=30, chunk=6, ahead=True)
    sampling = SamplingParams(4, ignore_eos=True)
    with engine.turn_session(6, 3, 9, 30) as session:
        states = [
            one for prompt in PROMPTS[:2] for one in session.add(Request(prompt, [1, 2, 3]), sampling, turns=True)
        ]
        prompts = [prompt for prompt in PROMPTS[:2] for _ in range(3)]
        turns = dict.fromkeys(range(len(states)), 0)
        while turns:
            session.step()
            for number in [one for one in turns if states[one].finish is not None]:
                state = states[number]
                start = state.turn_start
                _check(loaded, prompts[number] + state.tokens[:start], state.tokens[start:], state.plain_logprobs)
                turns[number] += 1
                if turns[number] == 3:
                    del turns[number]
                    session.cancel(state)
                else:
                    session.append(state, [3 + number] * chance.randrange(4), 7, 4)
        assert session.used_size.states == 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_suspended_samples_go_on_from_their_states(name, keep) -> None:
    loaded = family_model(name)
    engine = PagedEngine(loaded, 4, block=4, ahead=True)
    persistent = engine.persistent_session(3, 9, 3, 12, keep=keep)
    states = [
        one
        for prompt in PROMPTS
        for one in persistent.session.add(Request(prompt, [1, 2, 3]), SamplingParams(12, ignore_eos=True))
    ]
    rounds = 0
    while not persistent.session.finished:
        rounds += 1
        with persistent.resumed() as session:
            for _ in range(5):
                session.step()
    assert rounds > 2
    for state, prompt in zip(states, [prompt for prompt in PROMPTS for _ in range(3)], strict=True):
        _check(loaded, prompt, state.tokens, state.plain_logprobs)


def test_few_slots_are_enough_and_none_are_refused(monkeypatch) -> None:
    loaded = family_model("qwen3_5_text")
    engine = PagedEngine(loaded, 6, block=4)
    free, one = 10**9, engine._memory.total_bytes(engine._memory.empty_size)
    monkeypatch.setattr("ebbtide.rollout.paged.cache_memory._free_bytes", lambda device: free)
    monkeypatch.setattr(cache_costs, "STATES_MEMORY_FRACTION", 4.5 * one / free)
    requests = [Request(prompt, [1, 2]) for prompt in PROMPTS]
    found = engine.generate(requests, SamplingParams(5, ignore_eos=True), lambda *_: None)
    for request, group in zip(requests, found, strict=True):
        for sample in group:
            _check(loaded, list(request.prompt), sample.tokens, sample.plain_logprobs)
    monkeypatch.setattr(cache_costs, "STATES_MEMORY_FRACTION", 0.0)
    with pytest.raises(UserError, match=r"states of a sequence.*memory\.offload\.generate"):
        engine.generate(requests, SamplingParams(5), lambda *_: None)


def test_layers_get_tokens_of_the_models_type() -> None:
    """Some weights of OLMo hybrid stay in float32 where the model has 16 bits, and the first of a layer is one."""
    loaded = family_model("olmo_hybrid", torch.bfloat16)
    layer = state_layers(loaded.model).layers[0]
    for name in ("A_log", "dt_bias"):
        weight = layer.module.get_parameter(name)
        weight.data = weight.data.float()
    assert next(layer.module.parameters()).dtype == torch.float32
    engine = PagedEngine(loaded, 2, block=4, chunk=3)
    ((one,),) = engine.generate([Request(PROMPTS[0], [1])], SamplingParams(5, ignore_eos=True), lambda *_: None)
    assert (own_logprobs(loaded, PROMPTS[0], one.tokens) - torch.tensor(one.plain_logprobs)).abs().mean() <= 0.1
    assert {state.dtype for (kind, _), state in layer.sizes.items() if kind == "conv"} == {torch.bfloat16}


@pytest.mark.parametrize("name", KINDS)
def test_samples_of_several_adapters_have_each_their_own(name) -> None:
    """Layers with states run on a part of a pass at a time, and its adapters are those of its tokens."""
    taken = []
    for number in (1, 2):
        model = family_model(name).model
        add_adapters(model, LoraConfig(rank=2 + number, alpha=5), seed=number)
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B, std=0.3)
        taken.append(take_adapters(model))
    loaded = family_model(name)
    join_adapters(loaded.model, taken)
    assert any(row_adapters(layer.module).count for layer in state_layers(loaded.model).layers)
    engine = PagedEngine(loaded, 6, block=4, blocks=10, chunk=5)
    requests = [Request(prompt, [1, 2], number) for number, prompt in enumerate(PROMPTS)]
    found = engine.generate(requests, SamplingParams(9, ignore_eos=True), lambda *_: None)
    for request, group in zip(requests, found, strict=True):
        with row_adapters(loaded.model).chosen(torch.tensor([request.adapter])):
            for one in group:
                _check(loaded, list(request.prompt), one.tokens, one.plain_logprobs)


def test_no_state_outlives_its_session() -> None:
    engine = PagedEngine(family_model("lfm2"), 2, block=4)
    with engine.session([(1, 1)], 4) as session:
        session.add(Request([8], [1]), SamplingParams(4, ignore_eos=True))
        session.step()
        slots = [weakref.ref(state) for layer in engine._runner._cache.states for state in layer.values()]
    assert slots
    assert not any(one() is not None for one in slots)
