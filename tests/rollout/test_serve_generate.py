"""`/inference/v1/generate`: what environments that keep an episode's tokens themselves get."""

import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_serve import LONGEST, WatchedQueue, expected, in_thread, loaded, serving  # noqa: F401 (`loaded` is a fixture)

from ebbtide.model.load import load_model
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.serve import train_server
from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.schema import GenerateBody, parse_body
from ebbtide.rollout.serve.train_server import serve_during_training
from patience import PATIENCE

PROMPT = [104, 101, 108, 108, 111]


def generate(server, **body):
    """The request as Prime Intellect's `renderers` sends it, at the server's address without `/v1`."""
    url = f"{server.url.removesuffix('/v1')}/inference/v1/generate"
    body = {"model": "tiny", "token_ids": PROMPT, **body}
    return httpx.post(url, json=body, headers={"X-Session-ID": "episode-1"}, timeout=PATIENCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.3])
def test_tokens_and_log_probs_are_the_engines_own(loaded, temperature) -> None:  # noqa: F811
    (wanted,) = expected(loaded, PROMPT, SamplingParams(20, temperature), [5])
    params = {"temperature": temperature, "seed": 5, "max_tokens": 20, "logprobs": 1, "skip_special_tokens": False}
    with serving(loaded) as server:
        found = generate(server, sampling_params=params, cache_salt="7", priority=1)
    assert found.status_code == 200
    answer = found.json()
    (choice,) = answer["choices"]
    assert set(answer) == {"request_id", "choices", "usage"}
    assert set(choice) == {"index", "token_ids", "finish_reason", "logprobs"}
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, wanted.tokens, wanted.finish)
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in wanted.tokens]
    assert [one["logprob"] for one in content] == pytest.approx(wanted.plain_logprobs, abs=1e-5)
    new = len(wanted.tokens)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": new, "total_tokens": 5 + new}


def test_without_parameters_it_samples_all_there_is_room_for(loaded) -> None:  # noqa: F811
    with serving(loaded) as server:
        many = generate(server, sampling_params={"n": 3, "ignore_eos": True}).json()["choices"]
        alone = generate(server).json()["choices"]
    assert [len(choice["token_ids"]) for choice in many] == [LONGEST - 5] * 3
    assert [choice["index"] for choice in many] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in many} == {"length"}
    assert [choice["logprobs"] for choice in [*many, *alone]] == [None] * 4


def test_a_stop_token_ends_a_completion_and_belongs_to_it(loaded) -> None:  # noqa: F811
    (free,) = expected(loaded, PROMPT, SamplingParams(20, ignore_eos=True), [3])
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    with serving(loaded) as server:
        params = {"seed": 3, "max_tokens": 20, "ignore_eos": True, "stop_token_ids": [stop]}
        (choice,) = generate(server, sampling_params=params).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (free.tokens[: first + 1], "stop")


def test_an_episode_continues_by_its_own_tokens(loaded) -> None:  # noqa: F811
    """The tokens of a turn and what the environment appends are the next prompt, with nothing encoded again."""
    with serving(loaded) as server:
        params = {"seed": 1, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
        first = generate(server, sampling_params=params).json()["choices"][0]["token_ids"]
        prompt = [*PROMPT, *first, 0, 255, 128]  # no text encodes to these
        second = generate(server, token_ids=prompt, sampling_params=params).json()["choices"][0]["token_ids"]
        limit = server.client.models.retrieve("tiny").max_model_len
    assert second == expected(loaded, prompt, SamplingParams(8, ignore_eos=True), [1])[0].tokens
    assert limit == LONGEST


@pytest.mark.parametrize(
    ("body", "status", "why", "param"),
    [
        ({"token_ids": []}, 400, "`token_ids` should be a list of at least one token id", "token_ids"),
        ({"token_ids": "abc"}, 400, "`token_ids` should be a list of at least one token id", "token_ids"),
        ({"token_ids": [1, 99_999]}, 400, "the token id 99999 does not exist", "token_ids"),
        ({"token_ids": [1] * LONGEST}, 400, f"the prompt has {LONGEST} tokens, more than the limit", "token_ids"),
        ({"sampling_params": {"max_tokens": 99}}, 400, "`max_tokens` is 99, but after a prompt of 5", "max_tokens"),
        ({"sampling_params": {"top_p": 2}}, 400, "`sampling_params.top_p` should be", "sampling_params"),
        ({"sampling_params": {"logprobs": 5}}, 400, "`sampling_params.logprobs` is 5: write 1", "sampling_params"),
        ({"sampling_params": {"stop_token_ids": [99_999]}}, 400, "the token id 99999 does not", "sampling_params"),
        ({"sampling_params": {"stop_token_ids": ["a"]}}, 400, "`sampling_params.stop_token_ids`", "sampling_params"),
        ({"sampling_params": {"min_tokens": 3}}, 400, "`sampling_params.min_tokens` is not", "sampling_params"),
        ({"sampling_params": {"n": 101}}, 400, "the request is for 101 samples", "n"),
        ({"stream": True}, 400, "`stream` is not supported: leave it out", "stream"),
        ({"prompt": "a"}, 400, "`prompt` is not supported: leave it out", "prompt"),
        ({"model": "other"}, 404, "the model 'other' does not exist here", "model"),
    ],
)
def test_what_is_wrong_is_said(shared, body, status, why, param) -> None:
    found = generate(shared, **body)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(why)


@pytest.fixture(scope="module")
def shared(loaded):  # noqa: F811
    with serving(loaded) as server:
        yield server


def test_a_run_answers_with_the_weights_that_it_has(tiny, monkeypatch) -> None:
    monkeypatch.setattr(train_server, "RequestQueue", WatchedQueue)
    config = tiny({"rollout.engine": "paged", "rollout.serve_port": 0})
    model, said = load_model(config), []
    engine = PagedEngine(model, 4, block=4)
    with serve_during_training(engine, model, config, said.append):
        url = re.search(r"(http://\S+)/v1", said[0])[1]
        body = {"token_ids": [3, 4], "sampling_params": {"temperature": 0.0, "max_tokens": 4, "logprobs": 1}}
        thread, found = in_thread(lambda: httpx.post(f"{url}/inference/v1/generate", json=body, timeout=PATIENCE))
        queue, _ = engine._after_generate.args
        queue.came.get(timeout=PATIENCE)
        for parameter in model.model.parameters():
            parameter.data *= -1.5
        engine.generate([Request([3], [0])], SamplingParams(2), lambda *_: None)
        thread.join(PATIENCE)
    (wanted,) = expected(model, [3, 4], SamplingParams(4, 0.0))
    (choice,) = found.get().json()["choices"]
    assert choice["token_ids"] == wanted.tokens
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(wanted.plain_logprobs, abs=1e-5)


def test_token_ids_are_missing() -> None:
    with pytest.raises(ApiError, match=r"^`token_ids` is missing$"):
        parse_body(GenerateBody, b"{}", ["tiny"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.fixed_dictionaries(
        {"token_ids": JSON, "sampling_params": JSON | st.dictionaries(st.sampled_from(["n", "stop", "seed"]), JSON)}
    )
)
def test_any_body_is_read_or_refused(body) -> None:
    try:
        read = parse_body(GenerateBody, json.dumps(body).encode(), ["tiny"])
    except ApiError:
        return
    assert read.token_ids == body["token_ids"]
