"""What the page is made of: a run's files, read while they are written and however large; and the command that makes it."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ebbtide.cli import main
from ebbtide.errors import UserError
from ebbtide.loop import train
from ebbtide.report.page import build
from ebbtide.report.page.lines import Followed, some_of
from ebbtide.report.page.metrics import MOST_POINTS, MOST_STEPS, columns, looked_at, middle
from ebbtide.report.page.run import Run, named
from ebbtide.report.report import Report
from made_run import append, made_run, metrics_line, plan, sample_line


def ebbtide(capsys, *arguments: object) -> tuple[int, str, str]:
    before, sys.argv = sys.argv, ["ebbtide", *map(str, arguments)]
    try:
        main()
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        sys.argv = before
    return code, *capsys.readouterr()


def test_a_line_half_written_is_read_when_it_is_whole(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew')
    followed = Followed(file)
    assert followed.read() == [{"step": 1}]
    with file.open("a") as opened:
        opened.write('ard": 0.5}\n')
    assert followed.read() == [{"step": 1}, {"step": 2, "reward": 0.5}]
    assert followed.read() == [{"step": 1}, {"step": 2, "reward": 0.5}]


def test_a_line_cut_by_a_crash_costs_itself_alone(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "re\n[3]\n\xff\xfe\n{"reward": 1}\n{"step": 3}\n')
    assert Followed(file).read() == [{"step": 1}, {"step": 3}]


def test_a_file_that_a_resumed_run_wrote_anew_is_read_anew(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, {"step": 1}, {"step": 2}, {"step": 3})
    followed = Followed(file)
    assert len(followed.read()) == 3
    append(tmp_path / "other", {"step": 1}, {"step": 2, "reward": 0.123456, "loss": 0.123456})
    os.replace(tmp_path / "other", file)
    assert [line["step"] for line in followed.read()] == [1, 2]


def test_of_a_large_file_the_end_is_read_and_some_lines_before_it(tmp_path) -> None:
    file = tmp_path / "rollouts.jsonl"
    append(file, *({"step": step, "completion": "x" * 100} for step in range(1000)))
    found, whole = some_of(file, 5000, 20, 10**6)
    steps = [line["step"] for line in found]
    assert not whole
    assert steps == sorted(set(steps))
    newest = 1000 - (len(steps) - 20)
    assert steps[20:] == list(range(newest, 1000))
    assert 30 <= 1000 - newest <= 40  # 5000 bytes of them
    assert steps[0] == 0
    assert all(40 <= later - earlier <= 60 for earlier, later in pairwise(steps[:20]))  # spread over the rest
    assert len(some_of(file, 5000, 20, 300)[0]) < len(found)
    assert [line["step"] for line in some_of(file, 10**6, 20, 10**6)[0]] == list(range(1000))
    assert some_of(tmp_path / "nothing", 5000, 20, 300) == ([], True)


def test_one_line_longer_than_all_that_is_read(tmp_path) -> None:
    file = tmp_path / "rollouts.jsonl"
    append(file, {"step": 1, "completion": "x" * 20_000}, {"step": 2, "completion": "y" * 20_000})
    assert [line["step"] for line in some_of(file, 100, 0, 0)[0]] == [2]


def test_a_long_run_is_thinned_and_keeps_its_end() -> None:
    lines = [metrics_line(step) for step in range(1, 2 * MOST_POINTS + 2)]
    curves = columns(lines)
    assert len(curves["step"]) <= MOST_POINTS
    assert {len(column) for column in curves.values()} == {len(curves["step"])}
    assert curves["step"][-1] == 2 * MOST_POINTS + 1
    steps = [one["step"] for one in looked_at(lines)]
    assert len(set(steps)) == MOST_STEPS
    assert steps[0] == 1
    assert steps[-100:] == list(range(2 * MOST_POINTS - 98, 2 * MOST_POINTS + 2))
    assert middle(lines)["step"] == MOST_POINTS + 1
    assert not any("/generate" in key for key in curves)


def test_a_figure_that_is_no_number_is_left_out(tmp_path) -> None:
    run = made_run(tmp_path / "run", 2)
    append(run / "metrics.jsonl", {"step": 3, "loss": float("nan"), "reward": float("inf"), "seconds": float("nan")})
    append(run / "rollouts.jsonl", sample_line(3, 0, reward=float("nan"), logprobs=[float("-inf"), 1.0, 1.0, 1.0]))
    shown = json.loads(build.data([Run(run)]), parse_constant=pytest.fail)["runs"][0]
    assert shown["columns"]["loss"][-1] is None
    assert shown["rollouts"][-1]["reward"] is None
    assert shown["rollouts"][-1]["logprobs"] == [None, 1.0, 1.0, 1.0]


def test_no_text_can_leave_the_data_element(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    hostile = "</script><!-- <script> & \u2028\u2029 \ud800 @@SCRIPT@@"
    append(run / "rollouts.jsonl", sample_line(1, 0, completion=hostile))
    made = build.page([Run(run)])
    begin = made.index(b'id="data">') + len(b'id="data">')
    element = made[begin : made.index(b"</script", begin)].decode()
    assert not set(element) & set("<>&\u2028\u2029")
    assert json.loads(element)["runs"][0]["rollouts"][-1]["completion"] == hostile


def test_plans_of_every_shape(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    for written, shown in (("{", None), ("[1]", None), ('{"words": ["a"], "new": NaN}', {"words": ["a"], "new": None})):
        (run / "plan.json").write_text(written)
        assert Run(run).read()["plan"] == shown
    (run / "plan.json").write_text(json.dumps(plan()))
    assert Run(run).read()["plan"] == plan()


def test_runs_of_one_name_go_by_their_paths(tmp_path) -> None:
    folders = [made_run(tmp_path / above / "run", 1) for above in ("a", "b")]
    assert [run.name for run in named(folders)] == [str(folder) for folder in folders]
    assert [run.name for run in named(folders[:1])] == ["run"]


def test_the_command_writes_where_it_says(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(Path("a"))
    made_run(Path("b"))
    assert ebbtide(capsys, "report", "a") == (0, "a/report.html\n", "")
    assert ebbtide(capsys, "report", "a", "b") == (0, "report.html\n", "")
    assert ebbtide(capsys, "report", "b", "--out", "elsewhere.html") == (0, "elsewhere.html\n", "")
    for file in ("a/report.html", "report.html", "elsewhere.html"):
        assert Path(file).stat().st_size > 10**6
    assert sorted(entry.name for entry in Path("a").iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "rollouts.jsonl"]


def test_what_a_user_can_mend(capsys, tmp_path, monkeypatch) -> None:
    run = made_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([tmp_path / "empty"], "is no run folder, as it has no metrics.jsonl"),
        ([run, tmp_path / "nowhere"], "is no run folder"),
        ([run, "--out", tmp_path / "nowhere" / "x.html"], "cannot be written to"),
        ([run, "--out", tmp_path], "it is a folder"),
        ([run, "--out", "."], "it is a folder"),
        ([run, "--serve", "--out", "x.html"], "`--serve` writes no file"),
    ):
        code, _, error = ebbtide(capsys, "report", *arguments)
        assert code == 2
        assert said in error
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    code, _, error = ebbtide(capsys, "report", run)
    assert code == 2
    assert "pip install 'ebbtide[report]'" in error


@pytest.mark.parametrize(
    ("metrics", "number"),
    [
        (b"garbage", 1),
        (b"garbage\n", 1),
        (b'{"step": 1}\n\xff\xfe\n{"step": 2}\n', 2),
        (b'{"step": 1}\n[2]\n', 2),
        (b'{"step": 1}\n{"st\n', 2),
    ],
)
def test_figures_that_no_run_wrote_are_named(capsys, tmp_path, metrics, number) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    code, _, error = ebbtide(capsys, "report", tmp_path)
    assert code == 2
    assert f"{tmp_path / 'metrics.jsonl'}, line {number}: " in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("metrics", "none"), [(b"", True), (b'{"st', True), (b'{"step": 1}\n{"st', False)])
def test_a_run_in_progress_has_its_page(capsys, tmp_path, metrics, none) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    said = f"{tmp_path} has no steps yet\n" if none else ""
    assert ebbtide(capsys, "report", tmp_path) == (0, f"{tmp_path / 'report.html'}\n", said)
    assert (tmp_path / "report.html").exists()


def test_the_command_imports_neither_torch_nor_plotly(tmp_path) -> None:
    code = "import sys\nfrom ebbtide.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(bool({'torch', 'plotly'} & set(sys.modules)))"
    made_run(tmp_path / "run")
    subprocess.run([sys.executable, "-c", code, "report", str(tmp_path / "run")], check=True)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_run_writes_its_page_or_says_how_to_get_it(tiny, tmp_path, capsys, monkeypatch, there) -> None:
    if not there:
        monkeypatch.setattr("ebbtide.report.report.installed", lambda: False)
    config = tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1})
    with Report(config, "test") as report:
        train(config, report)
        report.end("done")
    said = capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists() == there
    assert ("\n  report.html\n" in said) == there
    assert ("pip install 'ebbtide[report]'" in said) == (not there)


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tiny, tmp_path, capsys, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise UserError("the page cannot be written to x: No space left on device")

    monkeypatch.setattr("ebbtide.report.report.write", full)
    config = tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1})
    with Report(config, "test") as report:
        train(config, report)
        report.end("done")
    assert "No space left on device" in capsys.readouterr().out
