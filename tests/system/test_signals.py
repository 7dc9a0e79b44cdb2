"""Ctrl-C and SIGTERM before the first step: at once, in a sentence, and with nothing left behind."""

import os
import signal
import subprocess
import sys

import pytest

from ebbtide.system import signals
from test_cli import ebbtide

# Sends the signal as a module is looked for: in the middle of the imports, and at the same place every time.
IMPORTING = """
import signal, sys
_, module, number, *arguments = sys.argv

class Finder:
    def find_spec(name, *_):
        if name == module:
            signal.raise_signal(int(number))

sys.meta_path.insert(0, Finder)
sys.argv = ["ebbtide", *arguments]
from ebbtide.__main__ import main
main()
"""


@pytest.mark.parametrize(("module", "number"), [("pydantic", signal.SIGINT), ("torch", signal.SIGTERM)])
def test_a_stop_while_modules_are_imported_is_one_sentence(tmp_path, module, number) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-c",
        IMPORTING,
        module,
        str(int(number)),
        "train",
        "quickstart",
        f"run.folder={tmp_path}/run",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "stopped before the first step"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


class Ended(BaseException):
    """In place of the process's end."""


@pytest.mark.parametrize(
    ("during", "number"), [("worker.load_initial", signal.SIGINT), ("algorithms.task.encode_prompts", signal.SIGTERM)]
)
def test_a_stop_before_the_first_step_takes_the_folder_back(tmp_path, capfd, monkeypatch, during, number) -> None:
    def end(code: int) -> None:
        assert code == 130
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(f"ebbtide.{during}", lambda *_, **__: signal.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(Ended):
        ebbtide(capfd, "train", "quickstart", f"run.folder={tmp_path}/run")
    assert capfd.readouterr().err.endswith("stopped before the first step: nothing was written\n")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(number) is before


def test_the_second_stop_does_not_wait_for_what_the_first_takes_back(monkeypatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code))
    before = signals.exit_on_signal(lambda: signal.raise_signal(signal.SIGTERM) or "")
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signals.restore_handlers(before)
    assert ended == [130, 130]


def test_what_a_command_writes_is_removed_when_it_is_stopped() -> None:
    removed = False
    with pytest.raises(SystemExit) as ended, signals.interrupt_on_signal():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            removed = True
            raise
    assert removed
    assert ended.value.code == 130
