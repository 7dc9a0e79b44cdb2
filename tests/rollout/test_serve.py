"""The server as its clients meet it, over real HTTP: answers are the engine's own, and whatever a client does,
nothing is left behind."""

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from queue import SimpleQueue

import httpx
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.config import load_serve
from ebbtide.errors import UserError
from ebbtide.launch.serve import serve
from ebbtide.model.load import load_model
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.serve import train_server
from ebbtide.rollout.serve.detokenize import Detokenizer
from ebbtide.rollout.serve.engine_loop import run_engine_loop
from ebbtide.rollout.serve.http import listen, run_http_server, server_url
from ebbtide.rollout.serve.preflight import check_installed, read_api_key
from ebbtide.rollout.serve.queue import RequestQueue
from ebbtide.rollout.serve.to_request import RequestLimits, describe_served_model
from ebbtide.rollout.serve.train_server import serve_during_training
from ebbtide.rollout.stopping import StopCondition
from patience import PATIENCE

LONGEST = 48
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{%"
    " endif %}"
)


class WatchedQueue(RequestQueue):
    """Tells when jobs come and go."""

    def __init__(self, room: int, stop_seconds: float = 0.0) -> None:
        super().__init__(room, stop_seconds)
        self.came: SimpleQueue[int] = SimpleQueue()
        self.went: SimpleQueue[int] = SimpleQueue()

    def submit(self, job) -> None:
        super().submit(job)
        self.came.put(self.pending_samples)

    def withdraw(self, job) -> None:
        super().withdraw(job)
        self.went.put(self.pending_samples)


class Server:
    """A server whose steps can be counted and held up."""

    def __init__(
        self,
        loaded,
        *,
        room=100,
        key=None,
        max_body=10_000,
        batch=8,
        stop_seconds=PATIENCE,
        ahead=False,
        patience=PATIENCE,
        chats=None,
    ) -> None:
        self.engine = PagedEngine(loaded, batch, block=4, ahead=ahead)
        self.queue = WatchedQueue(room, stop_seconds)
        self.steps = 0
        self._held, self._permits = False, threading.Semaphore(0)
        self.failure = self.breaks = None
        self._ready = threading.Event()
        self._listening = listen("127.0.0.1", 0)
        self.url = server_url(self._listening)
        limits = RequestLimits(LONGEST - 1, LONGEST - 1, LONGEST, room)
        self._models = [describe_served_model("tiny", loaded, limits, True, **(chats or {}))]
        self._how = {"key": key, "max_body": max_body, "patience": patience}
        self.client = openai.OpenAI(base_url=self.url, api_key=key or "none", max_retries=0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        try:
            with (
                self.engine.serving_session(LONGEST) as self.session,
                run_http_server(self.queue, self._models, self._listening, **self._how),
            ):
                step = self.session.step

                def watched():
                    if self._held:
                        self._permits.acquire()
                    if self.breaks is not None:
                        raise self.breaks
                    self.steps += 1
                    return step()

                self.session.step = watched
                self._ready.set()
                run_engine_loop(self.queue, self.session)
        except RuntimeError as error:
            self.failure = error

    def hold(self) -> None:
        self._held = True

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def release(self) -> None:
        self._held = False
        self._permits.release()

    def post(self, path="completions", **body):
        usual = {"prompt": "ab"} if path == "completions" else {}
        return httpx.post(f"{self.url}/{path}", json=usual | body, timeout=PATIENCE)

    def end(self) -> None:
        self.release()
        self.queue.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.client.close()

    def check_nothing_is_left(self) -> None:
        assert self.failure is None
        assert self.session.num_free_blocks == self.session.num_blocks
        assert self.session.finished
        assert not self.session._states
        assert not self.session._scheduler.groups
        assert self.queue.pending_samples == 0


@contextmanager
def serving(loaded, **options):
    server = Server(loaded, **options)
    try:
        yield server
    finally:
        server.end()
    server.check_nothing_is_left()


@pytest.fixture(scope="module")
def loaded():
    """A model that says any bytes."""
    from conftest import TINY, merged
    from ebbtide.config.algorithms.grpo import GrpoConfig

    loaded = load_model(GrpoConfig.model_validate(merged(TINY, {"model.scratch.alphabet": None})))
    torch.manual_seed(2)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return loaded


def expected(loaded, prompt, sampling, seeds=(0,)):
    """The engine's own completions."""
    ids = loaded.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    return PagedEngine(loaded, 8, block=4).generate([Request(ids, list(seeds))], sampling, lambda *_: None)[0]


def in_thread(function):
    """(thread, where its result or error will be)."""
    found = SimpleQueue()

    def run() -> None:
        try:
            found.put(function())
        except Exception as error:
            found.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


# Answers


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0}, SamplingParams(20, 0.0)),
        ({"temperature": 1.3, "seed": 5}, SamplingParams(20, 1.3)),
        (
            {"temperature": 0.9, "top_p": 0.9, "seed": 7, "extra_body": {"top_k": 30, "min_p": 0.01}},
            SamplingParams(20, 0.9, top_p=0.9, top_k=30, min_p=0.01),
        ),
        ({"seed": 3, "extra_body": {"ignore_eos": True}}, SamplingParams(20, ignore_eos=True)),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_completions_are_the_engines_own(loaded, asked, sampling, ahead) -> None:
    with serving(loaded, ahead=ahead) as server:
        found = server.client.completions.create(model="tiny", prompt="hello", n=3, max_tokens=20, logprobs=0, **asked)
    seeds = [asked.get("seed", 0) + i for i in range(3)]
    wanted = expected(loaded, "hello", sampling, seeds)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    for choice, completion in zip(found.choices, wanted, strict=True):
        assert choice.text == completion.text
        assert choice.finish_reason == completion.finish
        assert choice.logprobs.token_logprobs == pytest.approx(completion.plain_logprobs, abs=1e-5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(completion.tokens)
    assert found.usage.prompt_tokens == 5
    assert found.usage.completion_tokens == sum(len(completion.tokens) for completion in wanted)
    assert found.model == "tiny"


def test_samples_differ_without_a_seed(loaded) -> None:
    with serving(loaded) as server:
        found = server.client.completions.create(model="tiny", prompt="hello", n=4, max_tokens=20)
        again = server.client.completions.create(model="tiny", prompt="hello", max_tokens=20)
    assert len({choice.text for choice in [*found.choices, *again.choices]}) == 5


def test_prompts_of_every_kind(loaded) -> None:
    texts = ["ab", "c", "hello"]
    ids = [loaded.tokenizer(text)["input_ids"] for text in texts]
    with serving(loaded) as server:

        def ask(prompt):
            return server.client.completions.create(
                model="tiny", prompt=prompt, n=2, seed=1, max_tokens=9, extra_body={"return_token_ids": True}
            ).choices

        many, same, one, alike = ask(texts), ask(ids), ask("hello"), ask(ids[2])
    assert [(choice.text, choice.token_ids) for choice in many] == [(choice.text, choice.token_ids) for choice in same]
    assert [choice.text for choice in many[4:]] == [choice.text for choice in one] == [choice.text for choice in alike]
    assert [choice.prompt_token_ids for choice in many] == [ids[0], ids[0], ids[1], ids[1], ids[2], ids[2]]
    for text, first in zip(texts, (0, 2, 4), strict=True):
        for choice, completion in zip(
            many[first : first + 2], expected(loaded, text, SamplingParams(9), [1, 2]), strict=True
        ):
            assert choice.token_ids == completion.tokens


def test_log_probs_name_their_tokens(loaded) -> None:
    (wanted,) = expected(loaded, "hello", SamplingParams(20, 1.2), [4])
    with serving(loaded) as server:
        how = {"model": "tiny", "seed": 4, "temperature": 1.2, "max_tokens": 20}
        plain = server.client.completions.create(prompt="hello", logprobs=0, **how).choices[0].logprobs
        named = server.client.completions.create(
            prompt="hello", logprobs=0, extra_body={"return_tokens_as_token_ids": True}, **how
        ).choices[0]
        chat = server.client.chat.completions.create(
            messages=[{"role": "user", "content": "hello"}], logprobs=True, **how
        ).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in wanted.tokens]
    assert plain.tokens == [loaded.tokenizer.decode([token]) for token in wanted.tokens]
    assert [one.token for one in chat.logprobs.content] == plain.tokens
    assert [one.logprob for one in chat.logprobs.content] == plain.token_logprobs
    for one in chat.logprobs.content:
        assert one.bytes is None if "\ufffd" in one.token else bytes(one.bytes).decode() == one.token
    clear = [
        place for place in range(1, len(plain.tokens)) if "\ufffd" not in plain.tokens[place - 1] + plain.tokens[place]
    ]
    assert clear
    assert all(named.text[plain.text_offset[place] :].startswith(plain.tokens[place]) for place in clear)


def test_chat_with_and_without_a_template(loaded) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
    ]
    how = {"model": "tiny", "messages": messages, "seed": 2, "extra_body": {"return_token_ids": True}}
    with serving(loaded) as server:
        joined = server.client.chat.completions.create(max_completion_tokens=9, **how)
        longest = server.client.chat.completions.create(**how)
    assert joined.choices[0].message.content == expected(loaded, "suv", SamplingParams(9), [2])[0].text
    assert joined.choices[0].message.role == "assistant"
    assert loaded.tokenizer.decode(joined.prompt_token_ids) == "suv"
    assert longest.choices[0].token_ids == expected(loaded, "suv", SamplingParams(LONGEST - 3), [2])[0].tokens
    loaded.tokenizer.chat_template = TEMPLATE
    try:
        with serving(loaded) as server:
            found = server.client.chat.completions.create(max_tokens=9, **how)
    finally:
        loaded.tokenizer.chat_template = None
    assert loaded.tokenizer.decode(found.prompt_token_ids) == "<system>s<user>uv<assistant>"
    assert (
        found.choices[0].token_ids == expected(loaded, "<system>s<user>uv<assistant>", SamplingParams(9), [2])[0].tokens
    )


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("raise_exception('no such role')", "no such role"),
        ("1 + 'a'", "TypeError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(loaded, monkeypatch, fails, words) -> None:
    template = "{% if messages[0].role == 'boom' %}{{ " + fails + " }}{% endif %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    with serving(loaded) as server, pytest.raises(openai.BadRequestError, match=words):
        server.client.chat.completions.create(model="tiny", messages=[{"role": "boom", "content": "u"}])


@pytest.mark.parametrize("chat", [False, True])
def test_streamed_pieces_join_to_the_whole(loaded, chat) -> None:
    how = {
        "model": "tiny",
        "n": 3,
        "seed": 11,
        "temperature": 1.5,
        "max_tokens": 30,
        "stop": ["a", "\ufffd\ufffd"],
        "logprobs": True if chat else 0,
    }
    how |= {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    with serving(loaded) as server:
        create = server.client.chat.completions.create if chat else server.client.completions.create
        whole = create(extra_body={"return_token_ids": True}, **how)
        chunks = list(
            create(stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}, **how)
        )
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        mine = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        pieces = [piece.delta.content if chat else piece.text for piece in mine]
        assert "".join(pieces) == (choice.message.content if chat else choice.text)
        assert [token for piece in mine for token in piece.token_ids] == choice.token_ids
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        if chat:
            assert [piece.delta.role for piece in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert [one for piece in mine for one in piece.logprobs.content] == choice.logprobs.content
        else:
            assert [
                value for piece in mine for value in piece.logprobs.token_logprobs
            ] == choice.logprobs.token_logprobs
            prompts = [getattr(piece, "prompt_token_ids", None) for piece in mine]
            assert prompts == [choice.prompt_token_ids] + [None] * (len(mine) - 1)


def test_stop_texts_are_cut(loaded) -> None:
    (free,) = expected(loaded, "hello", SamplingParams(30, 1.0), [9])
    place = next(
        place for place in range(3, len(free.text) - 1) if free.text.find(free.text[place : place + 2]) == place
    )
    stop = free.text[place : place + 2]
    with serving(loaded) as server:
        (choice,) = server.client.completions.create(
            model="tiny", prompt="hello", seed=9, max_tokens=30, stop=stop
        ).choices
    assert choice.text == free.text[:place]
    assert choice.finish_reason == "stop"


def _byte_characters() -> dict[int, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTES = scratch_tokenizer(None)
TOKEN_OF_BYTE = {byte: BYTES.convert_tokens_to_ids(character) for byte, character in _byte_characters().items()}


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=6).map(str.encode),
            st.binary(max_size=4),
            st.just(b"stop"),
            st.just(b"st"),
            st.just(b"op!"),
        )
    ),
    st.lists(st.sampled_from(["stop", "op!", "t", "\N{GRINNING FACE}", "stst", "!st"]), max_size=3),
    st.randoms(use_true_random=False),
)
def test_text_comes_whole_and_never_with_a_stop(parts, stops, chance) -> None:
    """For any bytes, cut anywhere: the pieces join to what the engine says, and no piece has to be taken back."""
    tokens = [TOKEN_OF_BYTE[byte] for byte in b"".join(parts)]
    ending = StopCondition(SamplingParams(10_000, stop=tuple(stops)), BYTES, [])
    for length in range(len(tokens)):
        if ending.is_reached(tokens[:length], tokens[length]):
            tokens = tokens[: length + 1]
            break
    text, shown, place = Detokenizer(BYTES, stops), "", 0
    while place < len(tokens):
        more = chance.randint(1, 3)
        shown += text.add(tokens[place : place + more], last=place + more >= len(tokens))
        place += more
        whole = ending.completion(tokens, [], [], stopped=False).text
        assert whole.startswith(shown)
    assert not tokens or shown == whole


@pytest.mark.parametrize("kind", ["broken", "special", "mixed"])
def test_a_long_run_without_characters_is_not_decoded_over_and_over(kind) -> None:
    chance = random.Random(0)
    broken = [TOKEN_OF_BYTE[byte] for byte in chance.choices([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF], k=2000)]
    special = [BYTES.eos_token_id] * 2000
    tokens = {
        "broken": broken,
        "special": special,
        "mixed": [one for pair in zip(broken, special, strict=True) for one in pair],
    }[kind]
    text, shown, longest = Detokenizer(BYTES, []), "", 0
    for place, token in enumerate(tokens):
        shown += text.add([token], last=place == len(tokens) - 1)
        longest = max(longest, len(text._window))
    assert shown == BYTES.decode(tokens, skip_special_tokens=True)
    assert longest < 200


# Errors


def test_errors_say_what_is_wrong(loaded) -> None:
    cases = [
        ({"prompt": "a" * LONGEST}, 400, "prompt", "48 tokens, more than the limit of 47"),
        ({"max_tokens": LONGEST - 1}, 400, "max_tokens", "room for 46 (the limit for both together is 48)"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"n": 10**12}, 400, "n", "more than the limit of 100"),
        ({"n": 10**4000}, 400, "n", "less than or equal to"),
        ({"n": "2"}, 400, "n", "valid integer"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"prompt": None}, 400, "prompt", "a text, a list of texts"),
        ({"prompt": [1, "a"]}, 400, "prompt", "a text, a list of texts"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": [[]]}, 400, "prompt", "empty"),
        ({"prompt": [10**6]}, 400, "prompt", "the model has 0 to 256"),
        ({"prompt": [3, -1]}, 400, "prompt", "the token id -1 does not exist: the model has 0 to 256"),
        ({"prompt": [-(2**64)]}, 400, "prompt", "a text, a list of texts"),
        ({"stop": [""]}, 400, "stop", "1 to 256 characters"),
        ({"stop": ["x"] * 17}, 400, "stop", "at most 16"),
        ({"stream": "yes"}, 400, "stream", "boolean"),
        ({"logprobs": 5}, 400, "logprobs", "only 0 is supported"),
        ({"model": "gpt-4"}, 404, "model", "'tiny'"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
        ({"echo": True}, 400, "echo", "not supported"),
    ]
    with serving(loaded) as server:
        for body, status, param, words in cases:
            found = server.post(**body)
            assert found.status_code == status, (body, found.text)
            error = found.json()["error"]
            assert error["param"] == param
            assert words in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        fine = server.post(model=None, n=None, frequency_penalty=0, user="me", of_tomorrow=None, max_tokens=1)
        assert fine.status_code == 200
        chat = server.post(
            "chat/completions", messages=[{"role": "user", "content": "u"}], logprobs=True, top_logprobs=3
        )
        assert chat.status_code == 400
        assert "`top_logprobs` is 3: only 0" in chat.json()["error"]["message"]
        for messages in ([], "hello", [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "u"}]):
            wrong = server.post("chat/completions", messages=messages)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
        as_json = {"content-type": "application/json"}
        for text, words in (
            ("{", "not valid JSON"),
            ("[1]", "JSON object"),
            ("[" * 5000, "not valid JSON"),
            ("", "not valid JSON"),
            ('{"prompt": "\\ud800"}', "not valid JSON"),
        ):
            bad = httpx.post(f"{server.url}/completions", content=text, headers=as_json)
            assert bad.status_code == 400
            assert words in bad.json()["error"]["message"]
        assert httpx.post(f"{server.url}/completions", content="{}").status_code == 415
        # a name of another site's may lead here
        for name, code in (("evil.example:8000", 403), ("localhost", 200), ("127.0.0.1:1", 200)):
            assert httpx.get(f"{server.url}/models", headers={"Host": name}).status_code == code
        assert httpx.post(f"{server.url}/completions", content=b"x" * 10_001, headers=as_json).status_code == 413
        parts = httpx.post(f"{server.url}/completions", content=(b"x" * 4000 for _ in range(3)), headers=as_json)
        assert parts.status_code == 413
        assert httpx.get(f"{server.url}/nothing").json()["error"]["message"] == "there is no /v1/nothing here"
        assert httpx.get(f"{server.url}/completions").status_code == 405
        assert httpx.get(server.url.replace("/v1", "/health")).json() == {"status": "ok"}
        assert [model.id for model in server.client.models.list()] == ["tiny"]
        assert server.client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="'some/other' does not exist here: this server has 'tiny'"):
            server.client.models.retrieve("some/other")
        with pytest.raises(openai.NotFoundError):
            server.client.completions.create(model="other", prompt="a")


def test_the_api_key(loaded) -> None:
    with serving(loaded, key="sécret") as server:
        for path in ("/models", "/completions"):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "sécret".encode()},
                {"authorization": "Bearer"},
            ):
                found = httpx.request("GET" if path == "/models" else "POST", server.url + path, headers=headers)
                assert found.status_code == 401
                assert "sécret" not in found.text
                assert found.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(server.url + "/models", headers={"authorization": "bearer sécret".encode()}).status_code == 200
        assert httpx.get(server.url.replace("/v1", "/health")).status_code == 200


def test_where_the_key_comes_from(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("EBBTIDE_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("EBBTIDE_API_KEY", "a")
    assert read_api_key(None) == "a"
    (tmp_path / "key").write_text("b\n")
    assert read_api_key(tmp_path / "key") == "b"
    (tmp_path / "key").write_text("\n")
    for path in (tmp_path / "key", tmp_path / "nowhere"):
        with pytest.raises(UserError):
            read_api_key(path)


def test_settings_and_packages(monkeypatch) -> None:
    assert load_serve([]).host == "127.0.0.1"
    assert load_serve(["port=0", "max_length=10"]).max_length == 10
    with pytest.raises(UserError, match=r"unknown key `prot`.*Did you mean `port`"):
        load_serve(["prot=1"])
    with pytest.raises(UserError, match=r"`batch` is 0"):
        load_serve(["batch=0"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ebbtide\[serve\]"):
        check_installed()


def test_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="cannot listen"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_an_open_address_without_a_key_is_said() -> None:
    def said(host, key):
        found = []
        with pytest.raises(UserError, match="nowhere"):
            serve("./nowhere", load_serve([f"host={host}", "port=0"]), key, found.append)
        return " ".join(found)

    assert "anyone who reaches 0.0.0.0 can use this server" in said("0.0.0.0", None)
    assert said("0.0.0.0", "key") == said("127.0.0.1", None) == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_dies_ends_the_engines_work(loaded) -> None:
    server = Server(loaded)
    server.queue.loop.call_soon_threadsafe(server.queue.loop.stop)
    server._thread.join(PATIENCE)
    assert "has ended by itself" in str(server.failure)
    server.client.close()


# Clients that leave, queues that fill, engines that die


def raw(server, body: dict) -> socket.socket:
    """A request whose connection is the caller's to cut."""
    text = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.split(":")[2].split("/")[0])))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
        f" {len(text)}\r\n\r\n"
    )
    connection.sendall(head.encode() + text)
    return connection


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_samples(loaded, stream, ahead) -> None:
    with serving(loaded, ahead=ahead) as server:
        server.hold()
        body = {
            "prompt": "ab",
            "n": 3,
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
        }
        connection = raw(server, body)
        assert server.queue.came.get(timeout=PATIENCE) == 3
        server.allow(5)
        if stream:
            assert any(line.startswith(b"data: ") for line in connection.makefile("rb"))
        connection.close()
        assert server.queue.went.get(timeout=PATIENCE) == 0
        server.release()
        server.post(max_tokens=1)
        assert server.session.num_free_blocks == server.session.num_blocks
        assert server.steps < 15  # not all of 40


def test_a_client_that_leaves_the_queue(loaded) -> None:
    with serving(loaded, batch=1) as server:
        server.hold()
        first, found = in_thread(lambda: server.post(max_tokens=3, ignore_eos=True))
        server.queue.came.get(timeout=PATIENCE)
        waiting = [raw(server, {"prompt": "ab", "max_tokens": 40, "ignore_eos": True}) for _ in range(20)]
        for _ in waiting:
            server.queue.came.get(timeout=PATIENCE)
        for connection in waiting:
            connection.close()
        for _ in waiting:
            server.queue.went.get(timeout=PATIENCE)
        server.release()
        first.join()
        assert found.get().status_code == 200
    assert server.steps < 10


@pytest.mark.slow
def test_a_thousand_queued_requests_and_no_more(loaded) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with serving(loaded, room=1000, batch=64) as server:
            server.hold()

            async def ask():
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:

                    async def one(i):
                        body = {"prompt": "abcdefgh"[: 1 + i % 8], "seed": i, "max_tokens": 1 + i % 3}
                        return await client.post(f"{server.url}/completions", json=body)

                    async def one_more():
                        while await asyncio.to_thread(server.queue.came.get) < 1000:
                            pass
                        refused = await one(0)
                        server.release()
                        return refused

                    return await asyncio.gather(one_more(), *map(one, range(1000)))

            refused, *found = asyncio.run(ask())
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert {one.status_code for one in found} == {200}
        for i in (0, 500, 999):
            wanted = expected(loaded, "abcdefgh"[: 1 + i % 8], SamplingParams(1 + i % 3), [i])[0]
            assert found[i].json()["choices"][0]["text"] == wanted.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_told_to_everybody(loaded, stream) -> None:
    server = Server(loaded)
    server.hold()
    asked = [in_thread(lambda: server.post(stream=stream)) for _ in range(3)]
    for _ in asked:
        server.queue.came.get(timeout=PATIENCE)
    server.breaks = RuntimeError("out of something")
    server.release()
    for thread, found in asked:
        thread.join(PATIENCE)
        answer = found.get()
        assert answer.status_code == 500
        assert "out of something" not in answer.text
    server.end()
    assert server.failure is server.breaks


# Its end


def test_the_first_stop_lets_requests_end(loaded) -> None:
    with serving(loaded) as server:
        server.hold()
        thread, found = in_thread(lambda: server.post(max_tokens=20, seed=3))
        server.queue.came.get(timeout=PATIENCE)
        server.queue.stop()
        late = server.post()
        assert (late.status_code, late.json()["error"]["message"]) == (
            503,
            "the server is stopping and accepts no new requests",
        )
        assert httpx.get(server.url.replace("/v1", "/health")).status_code == 503
        server.release()
        thread.join()
        assert found.get().json()["choices"][0]["text"] == expected(loaded, "ab", SamplingParams(20), [3])[0].text
        server._thread.join(PATIENCE)
        with pytest.raises(httpx.ConnectError):
            server.post()


@pytest.mark.parametrize("how", ["second stop", "time is up"])
def test_requests_do_not_hold_up_the_end(loaded, how) -> None:
    server = Server(loaded, stop_seconds=0.0 if how == "time is up" else 1000.0)
    server.hold()
    thread, found = in_thread(lambda: server.post(max_tokens=40, ignore_eos=True))
    server.queue.came.get(timeout=PATIENCE)
    for _ in range(1 if how == "time is up" else 2):
        server.queue.stop()
    server.release()
    thread.join(PATIENCE)
    answer = found.get()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server has stopped")
    server._thread.join(PATIENCE)
    assert server.failure is None
    assert server.steps < 40
    server.client.close()


@pytest.mark.slow
def test_the_command_serves_a_run_and_ends_with_0(tmp_path) -> None:
    """Trains, serves the checkpoint, answers, and ends by each signal."""
    python = [sys.executable, "-m", "ebbtide"]
    small = ["train.steps=1", "evaluate=null", f"run.folder={tmp_path}/run"]
    subprocess.run([*python, "train", "quickstart", *small], check=True, capture_output=True)
    (tmp_path / "key").write_text("secret\n")
    for number in (signal.SIGTERM, signal.SIGINT):
        command = [*python, "serve", f"{tmp_path}/run", "port=0", "device=cpu", "--api-key-file", f"{tmp_path}/key"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            said = ""
            while not (at := re.search(r"serving run at (http://127.0.0.1:\d+/v1)", said)):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                said += line
            client = openai.OpenAI(base_url=at[1], api_key="secret", max_retries=0)
            answer = client.completions.create(model="run", prompt="12=", max_tokens=5, temperature=0)
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
            client.close()
        assert answer.usage.prompt_tokens == 3
        assert process.returncode == 0, err
        assert "the weights are those of step 1" in said
        assert "stopped" in out
        assert "secret" not in said + out + err
        assert "Traceback" not in err


# Beside training


def test_training_is_the_same_with_and_without_guests(tiny, tmp_path, monkeypatch) -> None:
    from test_loop import EVERYTHING, run

    changes = {**EVERYTHING, "rollout.engine": "paged", "run.name": "tiny", "train.steps": 3}
    alone = run(tiny, tmp_path / "alone", changes)
    answers = []
    submitted = SimpleQueue()
    submit = RequestQueue.submit

    def watched(queue, job) -> None:
        submit(queue, job)
        submitted.put(job)

    def begun(listening):
        """A guest asks before the first phase, and asks again whenever it has an answer."""
        at = server_url(listening)

        def ask():
            with openai.OpenAI(base_url=at, api_key="none", max_retries=0) as client:
                try:
                    for _ in range(50):
                        answers.append(
                            client.completions.create(model="tiny", prompt="123=", n=5, max_tokens=6, temperature=0)
                        )
                except (openai.InternalServerError, openai.APIConnectionError):
                    return  # the run has ended

        guests.append(in_thread(ask))
        submitted.get(timeout=PATIENCE)
        return at

    guests = []
    monkeypatch.setattr(RequestQueue, "submit", watched)
    monkeypatch.setattr(train_server, "server_url", begun)
    visited = run(tiny, tmp_path / "visited", {**changes, "rollout.serve_port": 0})
    guests[0][0].join(PATIENCE)
    assert visited[0] == alone[0]
    assert visited[1] == alone[1]
    assert all(torch.equal(alone[2][key], visited[2][key]) for key in alone[2])
    (first,) = expected(load_model(tiny(changes)), "123=", SamplingParams(6, 0.0))
    assert [choice.text for choice in answers[0].choices] == [first.text] * 5
    assert not [thread for thread in threading.enumerate() if thread.name == "http"]


def test_the_end_of_a_run_ends_what_waits(tiny, monkeypatch) -> None:
    monkeypatch.setattr(train_server, "RequestQueue", WatchedQueue)
    config = tiny({"rollout.engine": "paged", "rollout.serve_port": 0})
    loaded = load_model(config)
    said = []
    engine = PagedEngine(loaded, 4)
    with serve_during_training(engine, loaded, config, said.append):
        at = re.search(r"http://\S+", said[0])[0]
        thread, found = in_thread(lambda: httpx.post(f"{at}/completions", json={"prompt": "1="}, timeout=PATIENCE))
        queue, _ = engine._after_generate.args
        queue.came.get(timeout=PATIENCE)
    thread.join(PATIENCE)
    answer = found.get()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server has stopped")


def test_only_the_paged_engine_serves(tiny) -> None:
    with pytest.raises(ValueError, match=r"`rollout.serve_port: 8000` needs `rollout.engine: paged`"):
        tiny({"rollout.serve_port": 8000, "rollout.engine": "huggingface"})
