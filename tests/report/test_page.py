"""What the page is made of: a run's files, read while they are written and however large; and the command that makes
it."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest

from ebbtide.algorithms.loop import train
from ebbtide.cli import main
from ebbtide.errors import UserError
from ebbtide.report.page import build
from ebbtide.report.page.lines import GrowingFile, read_selection
from ebbtide.report.page.metrics import (
    MOST_POINTS,
    MOST_POINTS_OF_PHASES,
    MOST_STEPS,
    build_tables,
    elapsed_seconds,
    median_step,
    select_steps,
)
from ebbtide.report.page.run import PageRun, effective_starts, open_runs
from ebbtide.report.page.settings import MOST_SETTINGS, flatten_settings
from ebbtide.report.report import Report
from made_run import append, made_run, plan, sample_line, start_line


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
    followed = GrowingFile(file)
    assert followed.read() == [{"step": 1}]
    with file.open("a") as opened:
        opened.write('ard": 0.5}\n')
    assert followed.read() == [{"step": 1}, {"step": 2, "reward": 0.5}]
    assert followed.read() == [{"step": 1}, {"step": 2, "reward": 0.5}]


def test_a_line_cut_by_a_crash_costs_itself_alone(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "re\n[3]\n\xff\xfe\n{"reward": 1}\n{"step": 3}\n')
    assert GrowingFile(file).read() == [{"step": 1}, {"step": 3}]


def test_a_file_that_a_resumed_run_wrote_anew_is_read_anew(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, {"step": 1}, {"step": 2}, {"step": 3})
    followed = GrowingFile(file)
    assert len(followed.read()) == 3
    append(tmp_path / "other", {"step": 1}, {"step": 2, "reward": 0.123456, "loss": 0.123456})
    os.replace(tmp_path / "other", file)
    assert [line["step"] for line in followed.read()] == [1, 2]


def test_of_a_large_file_the_end_is_read_and_whole_groups_before_it(tmp_path) -> None:
    file = tmp_path / "rollouts.jsonl"
    append(
        file,
        *({"step": step, "group": group, "completion": "x" * 100} for step in range(500) for group in (0, 0, 1, 1)),
    )
    found, whole = read_selection(file, 5000, 20, 10**6)
    assert not whole
    groups = [(line["step"], line["group"]) for line in found]
    assert groups == sorted(groups)
    before = [group for group in groups if group[0] < 485]
    steps = [step for step, _ in before[::2]]
    assert all(before.count(group) == 2 for group in before)
    assert 30 <= len(groups) - len(before) <= 40  # 5000 bytes
    assert len(steps) == 20
    assert steps[0] == 0
    assert all(20 <= later - earlier <= 30 for earlier, later in pairwise(steps))  # spread over the rest
    few = [line["step"] for line in read_selection(file, 5000, 20, 1500)[0] if line["step"] < 485]
    assert len(few) < len(before)
    assert min(few) < 100 < 350 < max(few)  # and so are fewer
    assert len(read_selection(file, 10**6, 20, 10**6)[0]) == 2000
    assert read_selection(tmp_path / "nothing", 5000, 20, 300) == ([], True)


def test_one_line_longer_than_all_that_is_read(tmp_path) -> None:
    file = tmp_path / "rollouts.jsonl"
    append(file, {"step": 1, "completion": "x" * 20_000}, {"step": 2, "completion": "y" * 20_000})
    assert [line["step"] for line in read_selection(file, 100, 0, 0)[0]] == [2]


def test_a_long_run_is_thinned_and_keeps_its_end_and_its_evaluations() -> None:
    lines = [{"step": step, "seconds": step / 100, "seconds/train": 1.0} for step in range(1, 2 * MOST_POINTS + 2)]
    for line in lines[99::100]:
        line["evaluate/reward"] = 0.5
    whole, of_phases = build_tables(lines)
    assert len(whole["step"]) <= MOST_POINTS
    assert len(of_phases["step"]) <= MOST_POINTS_OF_PHASES
    for table in (whole, of_phases):
        assert {len(column) for column in (table["time"], *table["columns"].values())} == {len(table["step"])}
        assert table["step"][-1] == 2 * MOST_POINTS + 1
    assert list(of_phases["columns"]) == ["seconds/train"]
    assert whole["columns"]["evaluate/reward"].count(0.5) == len(lines[99::100])
    steps = [one["step"] for one in select_steps(lines)]
    assert len(set(steps)) == MOST_STEPS
    assert steps[0] == 1
    assert steps[-100:] == list(range(2 * MOST_POINTS - 98, 2 * MOST_POINTS + 2))
    assert median_step(lines)["step"] == MOST_POINTS + 1


def test_time_is_that_of_steps_evaluations_and_saves() -> None:
    lines = [
        {"step": 0, "seconds/evaluate": 0.5},
        {"step": 1, "seconds": 2.0, "seconds/train": 1.5},
        {"step": 2, "seconds": 2.0, "seconds/evaluate": 0.5, "seconds/save": 0.25},
    ]
    assert elapsed_seconds(lines) == [0.5, 2.5, 5.25]


def test_settings_are_flat_and_have_an_end(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1, "seed=7")
    shown = PageRun(run).read()["config"]
    assert (shown["seed"], shown["model.path"], shown["task.builtin.name"]) == ("7", "null", "copy")
    assert flatten_settings({"a": [1, 2], "b": [{"c": "d"}], "e": {}}) == {"a": "[1, 2]", "b.0.c": "d", "e": "{}"}
    for endless in (
        "a: &a [*a, *a]",
        "&a {b: *a, c: *a}",
        "a: &a [[1]]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(9)),
    ):
        (run / "config.yaml").write_text(endless)
        assert len(PageRun(run).read()["config"]) <= MOST_SETTINGS
    for no_config in ("[" * 600, "a: !!timestamp 2026-99-99", "{", "- 1"):
        (run / "config.yaml").write_text(no_config)
        assert PageRun(run).read()["config"] == {}


def test_a_metric_that_was_renamed_is_one_curve(tmp_path) -> None:
    """Also where an earlier run was resumed, and has both names."""
    folder = made_run(tmp_path / "run", 5)
    (folder / "metrics.jsonl").write_text('{"step": 1, "clipped": 0.25}\n{"step": 2, "clip_fraction": 0.5}\n')
    assert PageRun(folder).read()["tables"][0]["columns"] == {"clip_fraction": [0.25, 0.5]}


@pytest.mark.parametrize("earlier", [False, True], ids=["keys of today", "keys of earlier runs"])
def test_the_page_knows_the_prompts_and_the_group_of_a_step(tmp_path, earlier) -> None:
    folder = made_run(tmp_path / "run", 5, "rollout.prompts_per_step=6", "rollout.group_size=3")
    if earlier:
        text = (folder / "config.yaml").read_text()
        assert text.count("prompts_per_step:") == text.count("group_size:") == 1
        (folder / "config.yaml").write_text(
            text.replace("prompts_per_step:", "prompts:").replace("group_size:", "samples:")
        )
    shown = PageRun(folder).read()
    assert shown["group"] == 3
    assert shown["about"]["samples per step"] == "6 x 3"


def test_a_resumed_run_has_the_versions_of_the_steps_that_it_kept() -> None:
    starts = [
        start_line(0),
        start_line(10, torch="2.12"),
        start_line(30, torch="2.13"),
        start_line(20, torch="2.14"),
        start_line(20, torch="2.15"),
    ]
    kept = [(start["step"], start["versions"]["torch"]) for start in effective_starts(starts)]
    assert kept == [(0, "2.11.0"), (10, "2.12"), (20, "2.15")]
    assert effective_starts([{"step": 3}]) == [{"step": 3, "time": "", "versions": {}}]


def test_every_documented_metric_has_a_meaning_on_the_page() -> None:
    script = files("ebbtide.report.page").joinpath("meanings.js").read_text()
    patterns = [re.compile(found.replace("\\/", "/")) for found in re.findall(r"^  \[/(.*)/, ", script, re.MULTILINE)]
    documented = Path("docs/metrics.md").read_text().partition("\n\n`rollouts.jsonl`")[0]
    keys = [
        key for row in re.findall(r"^\| (`.*?) \|", documented, re.MULTILINE) for key in re.findall(r"`(.*?)`", row)
    ]
    assert len(keys) > 40
    assert [key for key in keys if key != "step" and not any(pattern.search(key) for pattern in patterns)] == []


def test_a_figure_that_is_no_number_is_left_out(tmp_path) -> None:
    run = made_run(tmp_path / "run", 2)
    append(
        run / "metrics.jsonl",
        {"step": 3, "loss": float("nan"), "reward": float("inf"), "seconds": float("nan"), "samples": 10**400},
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "samples": 1e400, "loss": true}\n')
    append(run / "rollouts.jsonl", sample_line(3, 0, reward=float("nan"), logprobs=[float("-inf"), 1.0, 1.0, 1.0]))
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 1e999, "logprobs": [-1e999, 1.0, 1.0, 1.0]}\n')  # JSON, and no floats
    shown = json.loads(build.build_data([PageRun(run)]), parse_constant=pytest.fail)["runs"][0]
    columns = shown["tables"][0]["columns"]
    assert columns["loss"][-2:] == columns["samples"][-2:] == [None, None]
    for sample in shown["rollouts"][-2:]:
        assert sample["reward"] is None
        assert sample["logprobs"] == [None, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["rollouts.jsonl", "versions.jsonl", "config.yaml", "plan.json"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_no_file(tmp_path, name) -> None:
    for make in (Path.mkdir, os.mkfifo):
        run = made_run(tmp_path / make.__name__, 1)
        (run / name).unlink(missing_ok=True)
        make(run / name)
        assert build.build_data([PageRun(run)])


def test_what_is_too_long_for_a_page_is_cut(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    append(run / "rollouts.jsonl", sample_line(2, 0, completion="a" * 300_000, token_chars=[300_000], logprobs=[-1.0]))
    append(run / "rollouts.jsonl", sample_line(2, 1, logprobs=5))
    long, odd = PageRun(run).read()["rollouts"][-2:]
    assert long["completion"].endswith("a … (300,000 characters)")
    assert "logprobs" not in long
    assert "logprobs" not in odd


def test_no_text_can_leave_the_data_element(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    hostile = "</script><!-- <script> & \u2028\u2029 \ud800 @@SCRIPT@@"
    append(run / "rollouts.jsonl", sample_line(1, 0, completion=hostile))
    made = build.build_page([PageRun(run)])
    begin = made.index(b'id="data">') + len(b'id="data">')
    element = made[begin : made.index(b"</script", begin)].decode()
    assert not set(element) & set("<>&\u2028\u2029")
    assert json.loads(element)["runs"][0]["rollouts"][-1]["completion"] == hostile


def test_plans_of_every_shape(tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    for written, shown in (
        ("{", None),
        ("[" * 9999, None),
        ("[1]", None),
        ('{"words": ["a"], "new": NaN}', {"words": ["a"], "new": None}),
    ):
        (run / "plan.json").write_text(written)
        assert PageRun(run).read()["plan"] == shown
    (run / "plan.json").write_text(json.dumps(plan()))
    assert PageRun(run).read()["plan"] == plan()


def test_runs_of_one_name_go_by_their_paths(tmp_path) -> None:
    folders = [made_run(tmp_path / above / "run", 1) for above in ("a", "b")]
    assert [run.name for run in open_runs(folders)] == [str(folder) for folder in folders]
    assert [run.name for run in open_runs(folders[:1])] == ["run"]


def test_the_command_writes_where_it_says(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(Path("a"))
    made_run(Path("b"))
    assert ebbtide(capsys, "report", "a") == (0, "a/report.html\n", "")
    assert ebbtide(capsys, "report", "a", "b") == (0, "report.html\n", "")
    assert ebbtide(capsys, "report", "b", "--out", "elsewhere.html") == (0, "elsewhere.html\n", "")
    for file in ("a/report.html", "report.html", "elsewhere.html"):
        assert Path(file).stat().st_size > 10**6
    assert sorted(entry.name for entry in Path("a").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "rollouts.jsonl",
        "versions.jsonl",
    ]


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
    code = (
        "import sys\nfrom ebbtide.cli import main\ntry:\n    main()\nexcept SystemExit:\n   "
        " pass\nsys.exit(bool({'torch', 'plotly'} & set(sys.modules)))"
    )
    made_run(tmp_path / "run")
    subprocess.run([sys.executable, "-c", code, "report", str(tmp_path / "run")], check=True)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_run_writes_its_page_or_says_how_to_get_it(tiny, tmp_path, capsys, monkeypatch, there) -> None:
    if not there:
        monkeypatch.setattr("ebbtide.report.report.plotly_is_installed", lambda: False)
    config = tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1})
    with Report(config, "test") as report:
        train(config, report)
        report.summarize_run("done")
    said = capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists() == there
    assert ("\n  report.html\n" in said) == there
    assert ("pip install 'ebbtide[report]'" in said) == (not there)


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tiny, tmp_path, capsys, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise UserError("the page cannot be written to x: No space left on device")

    monkeypatch.setattr("ebbtide.report.report.write_page", full)
    config = tiny({"run.folder": str(tmp_path / "run"), "train.steps": 1})
    with Report(config, "test") as report:
        train(config, report)
        report.summarize_run("done")
    assert "No space left on device" in capsys.readouterr().out
