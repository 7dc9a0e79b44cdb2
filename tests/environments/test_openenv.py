"""Environments of the real package `openenv`, as objects and as a server (`make environments`)."""

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from test_verifiers import config_of, model  # noqa: F401 (a fixture)

from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.report.report import Report

PYTHON = os.environ.get("OPENENV_PYTHON")
FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make environments` runs it, with openenv's own packages")


@pytest.fixture
def server():
    """The address of an environment's server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, "openenv_echo.py", str(port)], cwd=FOLDER)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            break
        except (urllib.error.URLError, ConnectionError):
            continue
    yield url
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", ["object", "url"])
def test_a_run_trains_on_it(kind, model, tmp_path, monkeypatch, request) -> None:  # noqa: F811
    monkeypatch.chdir(FOLDER)
    options = {"object": "openenv_echo:Echo"} if kind == "object" else {"url": request.getfixturevalue("server")}
    tree = config_of(model, tmp_path / "run", PYTHON)
    tree["task"]["environment"] |= {"object": "openenv", "options": options}
    config = GrpoConfig.model_validate(tree)
    with Report(config, "test") as report:
        train(config, report)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert [line["turns"] for line in steps] == [2.0] * 3
    assert all(0 <= line["reward"] <= 2 for line in steps)
