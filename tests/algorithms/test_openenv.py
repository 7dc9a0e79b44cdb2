"""OpenEnv, with the real package: `make environments` installs it in a virtual environment of its own."""

import socket
import threading
import time

import pytest

pytest.importorskip("openenv", reason="the package openenv is not installed: `make environments` installs it")

from test_environment_packages import LIMITS, trained

CLASSES = {"environment": "openenv_echo:Lengths", "action": "openenv_echo:Told"}


def task(options):
    return {"environment": {"object": "openenv", "options": options, **LIMITS}, "size": 8, "held_out": 0}


def check(metrics, rollouts) -> None:
    assert metrics[-1]["turns"] == 3
    assert rollouts[0]["prompt"].startswith("seed ")
    turn = rollouts[0]["turns"][0]
    length = len(turn["completion"])
    assert (turn["answer"], turn["reward"]) == (f"{length} characters", length % 2)


def test_a_class_in_the_environments_own_process(tmp_path) -> None:
    check(*trained(tmp_path / "run", task(CLASSES)))


def test_a_server(tmp_path) -> None:
    import uvicorn
    from openenv.core import create_fastapi_app

    from openenv_echo import Heard, Lengths, Told

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Lengths, Told, Heard, max_concurrent_envs=16)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    try:
        check(*trained(tmp_path / "run", task({"url": f"http://127.0.0.1:{port}"})))
    finally:
        server.should_exit = True
