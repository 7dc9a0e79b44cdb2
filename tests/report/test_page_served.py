"""The server of the page: for this machine alone, and deaf to everything in a request but which of two addresses it
asks for."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from ebbtide.errors import UserError
from ebbtide.report.page import serve
from ebbtide.report.page.serve import build_server
from made_run import append, made_run, metrics_line, serving
from patience import PATIENCE


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_page_and_its_data(tmp_path) -> None:
    run = made_run(tmp_path / "run", 3)
    with serving(run) as port:
        status, headers, page = ask(port, "/")
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        assert b"connect-src 'self'" in page
        status, headers, data = ask(port, "/data.json")
        assert status == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(data)["runs"][0]["tables"][0]["step"] == [0, 1, 2, 3]


def test_data_comes_again_only_when_a_file_has_changed(tmp_path) -> None:
    run = made_run(tmp_path / "run", 3)
    with serving(run) as port:
        tag = ask(port, "/data.json")[1]["ETag"]
        assert ask(port, "/data.json", **{"If-None-Match": tag})[::2] == (304, b"")
        append(run / "metrics.jsonl", metrics_line(4))
        status, headers, data = ask(port, "/data.json", **{"If-None-Match": tag})
        assert status == 200
        assert headers["ETag"] != tag
        assert json.loads(data)["runs"][0]["tables"][0]["step"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "127.0.0.1:80@evil.example", ""]
)
def test_another_name_for_this_machine_is_refused(tmp_path, host) -> None:
    with serving(made_run(tmp_path / "run")) as port:
        for path in ("/", "/data.json"):
            assert ask(port, path, Host=host)[0] == 403
        assert ask(port, "/data.json", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("path", ["/config.yaml", "/../run/config.yaml", "//etc/passwd", "/data.json?run=/etc", "/?x"])
def test_no_path_leads_to_a_file(tmp_path, path) -> None:
    with serving(made_run(tmp_path / "run")) as port:
        assert ask(port, path)[0] == 404
        assert ask(port, "/", "POST")[0] == 501


def test_only_the_loopback_address_is_bound(tmp_path) -> None:
    with build_server([made_run(tmp_path / "run")], 0) as running:
        assert running.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=r"cannot be used.*--port"):
            build_server([tmp_path / "run"], running.server_address[1])


def test_only_the_head_is_sent_to_who_asks_for_it(tmp_path) -> None:
    with serving(made_run(tmp_path / "run")) as port:
        status, headers, body = ask(port, "/", "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0


def test_connections_are_few_and_none_stays_that_asks_for_nothing(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(serve, "MOST", 3)
    monkeypatch.setattr(serve, "SECONDS", 0.5)
    with serving(made_run(tmp_path / "run")) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(3)]
        assert ask(port, "/")[0] == 503
        assert [one.recv(1) for one in idle] == [b""] * 3  # each is closed in time
        while ask(port, "/")[0] == 503:  # until the threads of the three have ended
            pass
        gone = socket.create_connection(("127.0.0.1", port))
        # so that what the server reads is an error
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone.sendall(b"GET")
        gone.close()
        assert ask(port, "/")[0] == 200
        for one in idle:
            one.close()
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_it_quietly(tmp_path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ebbtide", "report", str(made_run(tmp_path / "run")), "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # these tests may run in the background, where Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"serving {tmp_path / 'run'} live at http://127.0.0.1:")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "stopped\n", "")
    assert not (tmp_path / "run" / "report.html").exists()
