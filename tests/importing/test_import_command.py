"""`ebbtide import` as a command: what goes where, and its exit codes."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.cli import app, main

FILES = Path(__file__).parent / "files"


def test_the_yaml_is_on_stdout_and_the_lists_are_on_stderr(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(FILES / "trl_grpo.yaml")])
    assert result.exit_code == 0
    (tmp_path / "mine.yaml").write_text(result.stdout)
    assert CliRunner().invoke(app, ["config", str(tmp_path / "mine.yaml")]).exit_code == 0
    for title in ("\nbatches:", "\ntaken (", "not needed here (", "no counterpart ("):
        assert title in "\n" + result.stderr
        assert title not in "\n" + result.stdout


def test_with_out_the_yaml_is_a_file_and_the_plan_is_printed(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    arguments = ["import", str(FILES / "trl_grpo.yaml"), "--num_generations", "8", "--out", str(out), "--plan", "h100"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "group_size: 8" in out.read_text()
    assert "no counterpart (" in result.stdout
    assert "fits into the 79.1 GiB of the h100" in result.stdout
    assert CliRunner().invoke(app, ["plan", str(out), "--gpu", "h100"]).exit_code == 0


def test_a_plan_that_does_not_fit_has_exit_code_1() -> None:
    arguments = ["import", str(FILES / "verl_plain.sh"), "trainer.n_gpus_per_node=1", "--plan", "l4"]
    assert CliRunner().invoke(app, arguments).exit_code == 1


@pytest.mark.parametrize("name", ["nemo_ppo.yaml", "nothing.yaml"])
def test_bad_input_has_exit_code_2(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebbtide", "import", str(FILES / name)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_an_existing_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("x: 1\n")
    arguments = ["ebbtide", "import", str(FILES / "trl_grpo.yaml"), "--out", str(tmp_path / "mine.yaml")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert (tmp_path / "mine.yaml").read_text() == "x: 1\n"
