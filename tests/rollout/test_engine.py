"""Every engine: greedy is transformers' greedy, log-probs are a full forward's, and samples are independent."""

from functools import partial

import pytest
import torch

from completions import stopped_by
from conftest import FAMILIES, family, windowed_model
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [4, 4]]


ENGINES = {
    "huggingface": HuggingFaceEngine,
    "paged": PagedEngine,
    "paged, tight": partial(PagedEngine, block=2, chunk=3, blocks=14),  # prompts in pieces, samples that give way
    # planned before the last step's tokens are known
    "paged, ahead": partial(PagedEngine, block=2, chunk=3, blocks=14, ahead=True),
    "paged, no sharing": partial(PagedEngine, block=4, share_prompts=False),
}


@pytest.fixture(params=ENGINES)
def engine_of(request):
    return ENGINES[request.param]


def quiet(done: int, of: int) -> None:
    assert 0 <= done <= of


def loaded_model(tiny, changes=None):
    loaded = load_model(tiny(changes))
    torch.manual_seed(2)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return loaded


def forward_logprobs(model, prompt, tokens, temperature=1.0):
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_the_greedy_of_transformers(tiny, engine_of, name) -> None:
    loaded = loaded_model(tiny, family(name))
    engine = engine_of(loaded, batch=3)
    groups = engine.generate([Request(prompt, [0]) for prompt in PROMPTS], SamplingParams(7, temperature=0), quiet)
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        wanted = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert completion.tokens == wanted
        with torch.no_grad():
            torch.testing.assert_close(
                torch.tensor(completion.logprobs),
                forward_logprobs(loaded.model, prompt, completion.tokens),
                atol=1e-4,
                rtol=1e-4,
            )


def test_a_window_is_kept_to(engine_of) -> None:
    loaded = windowed_model("cpu")
    sampling = SamplingParams(20, temperature=0, ignore_eos=True)
    (group,) = engine_of(loaded, batch=3).generate([Request([3, 4, 5, 6, 7, 8, 9], [0])], sampling, quiet)
    with torch.no_grad():
        wanted = forward_logprobs(loaded.model, [3, 4, 5, 6, 7, 8, 9], group[0].tokens)
    torch.testing.assert_close(torch.tensor(group[0].logprobs), wanted, atol=1e-4, rtol=1e-4)


def test_requests_without_seeds_have_no_completions(tiny, engine_of) -> None:
    found = engine_of(loaded_model(tiny), batch=3).generate(
        [Request([3], []), Request([3], [1]), Request([4], [])], SamplingParams(3), quiet
    )
    assert [len(group) for group in found] == [0, 1, 0]


def test_sampled_logprobs_are_those_of_the_tempered_model(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    engine = engine_of(loaded, batch=16)
    groups = engine.generate(
        [Request(prompt, [1, 2, 3]) for prompt in PROMPTS], SamplingParams(6, temperature=0.8), quiet
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            with torch.no_grad():
                wanted = forward_logprobs(loaded.model, prompt, completion.tokens, 0.8)
                plain = forward_logprobs(loaded.model, prompt, completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(completion.plain_logprobs), plain, atol=1e-4, rtol=1e-4)


def test_a_sample_does_not_depend_on_its_neighbours(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    sampling = SamplingParams(8, temperature=1.0)
    crowd = [Request(prompt, [10 * i, 10 * i + 1]) for i, prompt in enumerate(PROMPTS)]
    for batch in (1, 3, 100):
        together = engine_of(loaded, batch).generate(crowd, sampling, quiet)
        alone = [engine_of(loaded, 100).generate([request], sampling, quiet)[0] for request in crowd]
        assert [[c.tokens for c in group] for group in together] == [[c.tokens for c in group] for group in alone]
    assert together[2][0].tokens != together[2][1].tokens


def test_end_tokens_and_lengths(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    engine = engine_of(loaded, batch=100)
    (group,) = engine.generate([Request([3, 4], list(range(60)))], SamplingParams(8, temperature=2.0), quiet)
    end = loaded.tokenizer.eos_token_id
    assert {completion.finish for completion in group} == {"stop", "length"}
    for completion in group:
        assert len(completion.tokens) == len(completion.logprobs) <= 8
        assert (completion.tokens[-1] == end) == (completion.finish == "stop")
        assert end not in completion.tokens[:-1]
        assert (len(completion.tokens) == 8) or completion.finish == "stop"
    (group,) = engine.generate(
        [Request([3, 4], list(range(60)))], SamplingParams(8, temperature=2.0, ignore_eos=True), quiet
    )
    assert {len(completion.tokens) for completion in group} == {8}
    assert any(end in completion.tokens for completion in group)


def test_stop_texts_end_a_completion_and_are_cut_from_its_text(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    engine = engine_of(loaded, batch=100)
    requests = [Request([3, 4], list(range(40)))]
    (free,) = engine.generate(requests, SamplingParams(8, temperature=2.0), quiet)
    (held,) = engine.generate(requests, SamplingParams(8, temperature=2.0, stop=("7", "12")), quiet)
    assert 0 < stopped_by(("7", "12"), free, held, loaded.tokenizer) < 40
    for before, after in zip(free, held, strict=True):
        assert after.logprobs == pytest.approx(before.logprobs[: len(after.logprobs)], abs=1e-5)


def test_a_special_token_can_be_a_stop_text(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["7"]})
    engine = engine_of(loaded, batch=100)
    (group,) = engine.generate(
        [Request([3, 4], list(range(40)))], SamplingParams(8, temperature=2.0, stop=("7",)), quiet
    )
    seven = loaded.tokenizer.convert_tokens_to_ids("7")
    stopped = [completion for completion in group if seven in completion.tokens]
    assert stopped
    assert all(completion.tokens.index(seven) == len(completion.tokens) - 1 for completion in stopped)
    assert all(completion.finish == "stop" for completion in stopped)


def test_weights_that_diverged_are_an_error_with_advice(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    next(loaded.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"logits are not finite.*`optimizer.lr`"):
        engine_of(loaded, batch=8).generate([Request([3, 4], [1])], SamplingParams(4), quiet)


def test_habits_of_the_models_own_generation_config_are_left_out(tiny, engine_of) -> None:
    loaded = loaded_model(tiny)
    engine = engine_of(loaded, batch=8)
    plain = engine.generate([Request([3, 4], [1, 2])], SamplingParams(8), quiet)
    loaded.model.generation_config.repetition_penalty = 5.0
    loaded.model.generation_config.temperature = 0.1
    assert engine.generate([Request([3, 4], [1, 2])], SamplingParams(8), quiet) == plain
    assert loaded.model.generation_config.repetition_penalty == 5.0
