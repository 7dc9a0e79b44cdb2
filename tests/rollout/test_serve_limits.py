"""What the server does to clients that ask for too much, send half of it, come from elsewhere, or leave."""

import json
import socket
import threading
from queue import SimpleQueue

import pytest
from pydantic import ValidationError
from test_serve import LONGEST, TEMPLATE, in_thread, loaded, raw, serving  # noqa: F401 (`loaded` is a fixture)

from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.serve import app
from ebbtide.rollout.serve.schema import ChatBody, CompletionBody
from ebbtide.system.hosts import is_loopback
from patience import PATIENCE


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.split(":")[2].split("/")[0])), timeout=PATIENCE)


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    with connection.makefile("rb") as file:
        return file.read()


def test_count_and_length_are_known_before_anything_is_read(loaded, monkeypatch) -> None:  # noqa: F811
    def read(*_):
        raise AssertionError("read before it was refused")

    monkeypatch.setattr(Encoder, "text", read)
    monkeypatch.setattr(Encoder, "chat", read)
    longest = max(map(len, loaded.tokenizer.get_vocab()))
    too_long = "a" * (longest * (LONGEST - 1) + 1)
    message = {"role": "user", "content": ""}
    cases = [
        ("completions", {"prompt": ["a"] * 100_000}, "n", "100000 samples, more than the limit of 100"),
        ("completions", {"prompt": ["a"] * 51, "n": 2}, "n", "102 samples"),
        ("completions", {"prompt": [[1]] * 101}, "n", "101 samples"),
        (
            "completions",
            {"prompt": ["a", too_long]},
            "prompt",
            f"{len(too_long)} characters, more than fit into the limit of 47 tokens",
        ),
        ("completions", {"prompt": ["a", *[[1]]]}, "prompt", "a text, a list of texts"),
        ("completions", {"prompt": [1] * 100_000}, "prompt", "100000 tokens, more than the limit of 47"),
        (
            "chat/completions",
            {"messages": [message] * 10_000},
            "messages",
            "10000 messages, more than the limit of 47 tokens",
        ),
        ("chat/completions", {"messages": [{**message, "content": too_long}]}, "messages", "characters"),
        ("chat/completions", {"messages": [{**message, "role": too_long}]}, "messages", "characters"),
    ]
    with serving(loaded, max_body=2_000_000) as server:
        for path, body, param, words in cases:
            found = server.post(path, **body)
            assert found.status_code == 400, (path, found.text[:300])
            assert found.json()["error"]["param"] == param
            assert words in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [None] * 100}),
        (CompletionBody, {"prompt": [[None] * 100]}),
        (CompletionBody, {"prompt": [1] * 100 + ["a"]}),
        (ChatBody, {"messages": [{}] * 100}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 100}]}),
    ],
)
def test_a_wrong_list_is_wrong_at_its_first_mistake(kind, body) -> None:
    """A million of them, each explained, would keep everybody waiting."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(body))
    assert refused.value.error_count() < 8


def test_prompts_of_many_requests_are_read_in_turns(loaded, monkeypatch) -> None:  # noqa: F811
    read, begun, go, asked = [], SimpleQueue(), threading.Event(), SimpleQueue()
    text, asked_of = Encoder.text, app.parse_prompts

    def slow(encoder, one):
        read.append(one)
        begun.put(one)
        assert go.wait(PATIENCE)
        return text(encoder, one)

    def watched(body, served):
        asked.put(body)
        return asked_of(body, served)

    monkeypatch.setattr(Encoder, "text", slow)
    monkeypatch.setattr(app, "parse_prompts", watched)
    with serving(loaded) as server:
        many, _ = in_thread(lambda: server.post(prompt=list("abcdef"), max_tokens=1))
        begun.get(timeout=PATIENCE)
        one, _ = in_thread(lambda: server.post(prompt="z", max_tokens=1))
        for _ in range(2):
            asked.get(timeout=PATIENCE)
        go.set()
        many.join(PATIENCE)
        one.join(PATIENCE)
    assert "".join(read) == "azbcdef"


def test_a_client_that_leaves_before_its_prompts_are_read(loaded, monkeypatch) -> None:  # noqa: F811
    read, begun, go, gone = [], SimpleQueue(), threading.Event(), threading.Event()
    text, gone_client = Encoder.text, app._gone_client

    def slow(encoder, one):
        read.append(one)
        begun.put(one)
        assert go.wait(PATIENCE)
        return text(encoder, one)

    async def noticed(receive) -> None:
        await gone_client(receive)
        gone.set()

    monkeypatch.setattr(Encoder, "text", slow)
    monkeypatch.setattr(app, "_gone_client", noticed)
    with serving(loaded) as server:
        connection = raw(server, {"prompt": ["ab"] * 50, "max_tokens": 1})
        begun.get(timeout=PATIENCE)
        connection.close()
        assert gone.wait(PATIENCE)
        go.set()
        assert server.post(prompt="z", max_tokens=1).status_code == 200
        assert server.queue.came.get(timeout=PATIENCE) == 1
        assert server.queue.came.empty()
    assert len(read) <= 3


@pytest.mark.parametrize("late", [b"x", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"x" * 100_000])
def test_a_client_that_leaves_with_more_behind_its_request(loaded, late) -> None:  # noqa: F811
    with serving(loaded) as server:
        server.hold()
        connection = raw(server, {"prompt": "ab", "max_tokens": 40, "ignore_eos": True})
        assert server.queue.came.get(timeout=PATIENCE) == 1
        connection.sendall(late)
        connection.close()
        assert server.queue.went.get(timeout=PATIENCE) == 0


def test_requests_that_come_one_behind_the_other_are_answered(loaded) -> None:  # noqa: F811
    with serving(loaded) as server:
        connection = raw(server, {"prompt": "ab", "max_tokens": 2})
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert all_of(connection).count(b"HTTP/1.1 200 OK") == 2


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
)


@pytest.mark.parametrize(
    "part", [b"", HEAD[:30], HEAD, HEAD + b'{"prompt"'], ids=["nothing", "half a head", "no body", "half a body"]
)
def test_half_a_request_is_cut_off_in_time(loaded, part) -> None:  # noqa: F811
    with serving(loaded, patience=0.05) as server, connected(server) as connection:
        connection.sendall(part)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"not complete after 0.05 s" in answer


def test_a_whole_request_is_not(loaded) -> None:  # noqa: F811
    with serving(loaded, patience=0.05) as server:
        server.hold()
        waiting = raw(server, {"prompt": "ab", "max_tokens": 2})
        server.queue.came.get(timeout=PATIENCE)
        with connected(server) as connection:  # which has less time left than `waiting` would have
            assert b"408" in all_of(connection)
        server.release()
        assert waiting.recv(100).startswith(b"HTTP/1.1 200 OK")
        waiting.sendall(HEAD[:30])  # the next request of the same connection
        assert b"HTTP/1.1 408 Request Timeout\r\n" in all_of(waiting)


OWN = ["127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000", "127.0.0.1:1"]
FOREIGN = [
    "evil.example",
    "127.0.0.1:80@evil",
    "127.0.0.1@evil",
    "a]b[",
    "",
    "::1",
    "localhost.evil",
    "127.0.0.1:8000:1",
    "127.0.0.1 ",
    "127.0.0.1:\u0661",
]


def test_the_name_that_was_asked_for_is_compared_as_it_was_sent() -> None:
    assert all(map(is_loopback, OWN))
    assert not any(map(is_loopback, FOREIGN))


def test_requests_for_another_name_are_refused(loaded) -> None:  # noqa: F811
    with serving(loaded) as server:
        for host in ["localhost", *FOREIGN[:5]]:
            with connected(server) as connection:
                connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = all_of(connection).split()[1]
            assert status == (b"200" if host == "localhost" else b"403"), host


def test_control_tokens_in_messages_and_prompts_are_text(loaded, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE.replace("<assistant>", "{{ eos_token }}"))
    end = loaded.tokenizer.eos_token_id
    with serving(loaded) as server:
        chat = server.post(
            "chat/completions",
            messages=[{"role": "user", "content": "<end>hi<pad>"}],
            max_tokens=1,
            return_token_ids=True,
        )
        text = server.post(prompt="<end>hi", max_tokens=1, return_token_ids=True)
        tokens = server.post(prompt=[end, end], max_tokens=1, return_token_ids=True)
    found = chat.json()["prompt_token_ids"]
    assert found.count(end) == 1
    assert loaded.tokenizer.decode(found) == "<user><end>hi<pad><end>"
    assert end not in text.json()["choices"][0]["prompt_token_ids"]
    assert tokens.json()["choices"][0]["prompt_token_ids"] == [end, end]
