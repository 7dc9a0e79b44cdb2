"""Connections, and clients that misuse them. The test is the engine: it takes jobs from the queue, and answers them."""

import errno
import json
import logging
import resource
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from test_serve import BYTES, WatchedQueue, in_thread

from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.serve import server as door
from ebbtide.rollout.serve.connection import Connection
from ebbtide.rollout.serve.http import listen, run_http_server
from ebbtide.rollout.serve.queue import TokenEvent
from ebbtide.rollout.serve.to_request import RequestLimits, ServedModel
from patience import PATIENCE

ROOM = 8
LONG = 20_000  # characters of an answer: more than the kernel takes for a client that takes none


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch) -> None:
    monkeypatch.setattr(door, "SEND_BUFFER", 4096)
    monkeypatch.setattr(door, "LAST_SECONDS", 0.2)


class Stub:
    def __init__(self, listening: socket.socket, stop_seconds: float) -> None:
        self.queue = WatchedQueue(ROOM, stop_seconds)
        self.address = listening.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def connected(self) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.settimeout(PATIENCE)
        made.connect(self.address)
        return made

    def asked(self, **body) -> socket.socket:
        """A request whose connection is the caller's."""
        text = json.dumps({"prompt": "ab", **body}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        connection = self.connected()
        connection.sendall(f"{head}{len(text)}\r\n\r\n".encode() + text)
        return connection

    def taken(self):
        (job,) = self.queue.pop_requests(wait=True)
        return job

    def answer(self, job, tokens: int = 1) -> None:
        ids = BYTES("x")["input_ids"] * tokens
        self.queue.publish(
            [(job, TokenEvent(index, ids, [0.0] * tokens, "length")) for index in range(job.sample_count)]
        )


@contextmanager
def serving(*, patience=PATIENCE, stop_seconds=0.0):
    served = ServedModel(
        "tiny", BYTES, len(BYTES), Encoder(BYTES, templated=True), RequestLimits(100, 100, 200, ROOM), 8
    )
    with listen("127.0.0.1", 0) as listening:
        server = Stub(listening, stop_seconds)
        with run_http_server(server.queue, [served], listening, key=None, max_body=10_000, patience=patience):
            yield server


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    with connection, connection.makefile("rb") as file:
        return file.read()


def ask_health(server: Stub) -> int:
    return httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code


# How many


@pytest.mark.parametrize(
    ("limits", "raised", "most"),
    [
        ((1024, 4096), (2 * 1152, 4096), 1152),
        ((1024, 1024), None, 512),
        ((256, 500), (500, 500), 250),
        ((20_000, 20_000), None, 1152),
        ((1024, resource.RLIM_INFINITY), (2 * 1152, resource.RLIM_INFINITY), 1152),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 1152),
    ],
)
def test_half_of_the_files_are_left_to_the_run(monkeypatch, limits, raised, most) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    assert door.max_connections(1024) == most
    assert now[1:] == ([] if raised is None else [raised])


def test_a_limit_that_cannot_be_raised_is_heeded(monkeypatch) -> None:
    def refuse(*_) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert door.max_connections(1024) == 128


def test_a_connection_too_many_is_refused_and_the_others_stay(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    with serving() as server:
        kept = [server.asked() for _ in range(6)]
        for _ in kept:
            server.queue.came.get(timeout=PATIENCE)
        refused = [all_of(server.connected()) for _ in range(20)]
        assert {one.split(b"\r\n")[0] for one in refused} == {b"HTTP/1.1 503 Service Unavailable"}
        assert "6 connections are open" in json.loads(refused[0].split(b"\r\n\r\n")[1])["error"]["message"]
        for job in server.queue.pop_requests(wait=True):
            server.answer(job)
        assert all(one.recv(15) == b"HTTP/1.1 200 OK" for one in kept)
        for one in kept:
            one.close()
        while ask_health(server) == 503:  # until the server has seen that they are closed
            pass


def test_a_process_without_files_says_nothing_and_goes_on(monkeypatch, caplog) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    def failing(listening):
        if failures:
            raise OSError(failures.pop(), "no")
        return accept(listening)

    with serving() as server:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert ask_health(server) == 200
    assert not failures
    assert not caplog.records


# Clients that take nothing


@pytest.mark.parametrize("stream", [False, True])
def test_samples_count_until_the_engine_has_ended_them(stream) -> None:
    with serving() as server, server.asked(n=ROOM, stream=stream):
        job = server.taken()
        assert server.queue.pending_samples == ROOM
        server.answer(job, LONG)
        assert httpx.get(f"{server.url}/health").status_code == 200  # by now the loop has heard of it
        assert server.queue.pending_samples == 0
        with server.asked(n=ROOM) as other:
            server.answer(server.taken())
            assert other.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_nobody_takes_are_bounded(stream) -> None:
    with serving() as server:
        idle = []
        for _ in range(3):
            idle.append(server.asked(n=ROOM // 2, stream=stream))
            server.answer(server.taken(), LONG)
        server.queue.went.get(timeout=PATIENCE)  # the one that has waited longest
        assert all_of(idle[0]).count(b"x" * LONG) < ROOM // 2
        for one in idle[1:]:
            one.shutdown(socket.SHUT_WR)
            answer = all_of(one)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.count(b"x" * LONG) == ROOM // 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_is_cut(stream, caplog) -> None:
    with serving(patience=0.2) as server, server.asked(n=2, stream=stream) as connection:
        server.answer(server.taken(), LONG)
        server.queue.went.get(timeout=PATIENCE)
        assert all_of(connection).count(b"x" * LONG) < 2
    assert not caplog.records


def test_a_client_that_takes_its_time_is_not() -> None:
    said = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 999, abort=lambda: said.append("abort"))
    connection = SimpleNamespace(transport=transport, _watch=lambda: said.append("watch"))
    for left in (1000, 999):
        Connection._check_taken(connection, left)
    assert said == ["watch", "abort"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_does_not_hold_up_the_end(stream, caplog) -> None:
    with serving() as server:
        connection = server.asked(n=ROOM, stream=stream)
        server.answer(server.taken(), LONG)
        assert ask_health(server) == 200
        server.queue.stop()
    connection.close()
    assert not caplog.records


def test_an_answer_may_be_taken_until_the_time_is_up(monkeypatch) -> None:
    ends, shutdown = threading.Event(), Connection.shutdown

    def watched(connection) -> None:
        shutdown(connection)
        ends.set()

    def late() -> bytes:
        assert ends.wait(PATIENCE)
        return all_of(connection)

    monkeypatch.setattr(door, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(Connection, "shutdown", watched)
    with serving(stop_seconds=PATIENCE) as server:
        connection = server.asked()
        server.answer(server.taken(), LONG)
        thread, found = in_thread(late)
        server.queue.stop()
    thread.join(PATIENCE)
    assert b"x" * LONG in found.get()


# What is no request


@pytest.mark.parametrize(
    "sent", [b"x\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_in_the_usual_shape(sent, caplog) -> None:
    with serving() as server, server.connected() as connection:
        connection.sendall(sent)
        head, body = all_of(connection).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not caplog.records


def test_no_line_is_written_for_a_request_to_upgrade(caplog) -> None:
    with caplog.at_level(logging.WARNING), serving() as server:
        headers = {"Upgrade": "websocket", "Connection": "upgrade"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    assert not caplog.records


# What comes behind


@pytest.mark.parametrize("path", ["completions", "nothing"])
def test_a_refused_body_is_not_read_to_its_end(path) -> None:
    with serving() as server, server.connected() as connection:
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {10**11}\r\n\r\n"
        connection.sendall(f"POST /v1/{path} HTTP/1.1\r\n{headers}".encode())
        with pytest.raises(ConnectionError):
            connection.sendall(b" " * 50_000_000)
        assert connection.recv(12) == (b"HTTP/1.1 413" if path == "completions" else b"HTTP/1.1 404")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(stream) -> None:
    with serving() as server:
        connection = server.asked(stream=stream)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.answer(server.taken())
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"text":' in answer


def test_a_client_that_leaves_after_it_has_sent_no_more_is_gone() -> None:
    with serving() as server:
        connection = server.asked()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert server.queue.came.get(timeout=PATIENCE) == 1
        # so that it is told at once, and not by keepalive
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        assert server.queue.went.get(timeout=PATIENCE) == 0
