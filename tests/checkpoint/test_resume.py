"""A run that stops and goes on is the run that never stopped, to the bit; what is damaged is found, named and passed
over."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from disk import room_for
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.checkpointer import Checkpointer
from ebbtide.checkpoint.export import export
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.checkpoint.resume import FOLDER, find_checkpoint
from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.store import UNFINISHED, list_checkpoints, prune
from ebbtide.checkpoint.tensors import TensorReader
from ebbtide.checkpoint.writer import Writer
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError
from ebbtide.launch import serve as serve_run
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.report.report import Report
from killed import Numbers, save_until_killed, saver
from patience import PATIENCE

MEASURED = ("seconds", "tokens_per_second", "peak_gib", "reserved_gib", "device_gib", "host_gib", "moved_gib")

EVERYTHING = {
    "train.minibatches": 2,
    "loss.kl": {"coefficient": 0.1},
    "rollout.group_size": 8,
    "optimizer.weight_decay": 0.1,
    "optimizer.schedule": "cosine",
    "evaluate": {"every": 2, "problems": 6},
    "task.size": 10,  # so that the sampler is in its second epoch
    "checkpoint": {"every": 2, "keep": 2, "keep_best": 0, "async_save": False},
    "train.steps": 5,
}
MODES = {
    "device": {},
    "streamed": {"optimizer.place": "streamed", "memory.preset": "lean"},
    "cpu": {"optimizer.place": "cpu"},
    "split": {"optimizer.cpu_fraction": 0.4, "memory.preset": "lean"},
}


def run(config, resumed=None):
    """(metrics without what is measured, rollouts, weights)."""
    with Report(config, "test", resumed=resumed) as report:
        weights = train(config, report).model.state_dict()
        folder = report.folder.path
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return metrics, (folder / "rollouts.jsonl").read_text(), weights


def same(one, other) -> bool:
    return one[:2] == other[:2] and all(torch.equal(one[2][key], other[2][key]) for key in one[2])


def stop_after(folder: Path, step: int) -> None:
    """As if the run had been killed some time after a checkpoint: later ones are gone, its lines are not."""
    for saved in list_checkpoints(folder / "checkpoints"):
        if saved.step > step:
            shutil.rmtree(saved.path)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in ("device", "cpu") else pytest.mark.slow) for mode in MODES]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_never_stopped(tiny, tmp_path, mode, dtype, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.checkpoint.state.READ_AT_ONCE", 3000)  # elements: some of the parameters
    checkpoint = {**EVERYTHING["checkpoint"], "async_save": dtype == "bfloat16"}
    changes = {**EVERYTHING, **MODES[mode], "model.dtype": dtype, "checkpoint": checkpoint}
    straight = run(tiny({**changes, "run.folder": str(tmp_path / "straight")}))
    config = tiny({**changes, "run.folder": str(tmp_path / "stopped")})
    run(config)
    stop_after(tmp_path / "stopped", 4)
    (tmp_path / "stopped" / "metrics.jsonl").open("a").write('{"step": 5, "cut')  # killed in the middle of a line
    again = tiny({**changes, "run.folder": str(tmp_path / "stopped"), "resume": "auto"})
    resumed = find_checkpoint(again, print)
    assert resumed.step == 4
    assert same(run(again, resumed), straight)


def test_another_optimizer_mode_goes_on_from_the_same_state(tiny, tmp_path) -> None:
    config = tiny({**EVERYTHING, "run.folder": str(tmp_path / "a")})
    straight = run(config)
    stop_after(tmp_path / "a", 4)
    said: list[str] = []
    again = tiny({**EVERYTHING, "run.folder": str(tmp_path / "a"), "resume": "auto", "optimizer.place": "streamed"})
    resumed = find_checkpoint(again, said.append)
    assert said == ["since the checkpoint, `optimizer.place` was 'device' and is 'streamed'"]
    assert same(run(again, resumed), straight)  # streamed is the device to the bit


def test_another_model_is_another_run(tiny, tmp_path) -> None:
    run(tiny({**EVERYTHING, "train.steps": 2, "run.folder": str(tmp_path / "a")}))
    for key, value in (("seed", 7), ("model.scratch.layers", 3), ("optimizer.state_dtype", "bfloat16")):
        with pytest.raises(UserError, match=f"`{key}` was"):
            find_checkpoint(
                tiny({**EVERYTHING, key: value, "run.folder": str(tmp_path / "a"), "resume": "auto"}), print
            )
    with pytest.raises(UserError, match="raise it to continue"):
        find_checkpoint(tiny({**EVERYTHING, "train.steps": 1, "resume": str(tmp_path / "a")}), print)


def test_rounded_weights_are_not_taken_for_exact_ones(tiny, tmp_path, monkeypatch) -> None:
    """`model.dtype: auto` is bfloat16 on a GPU and float32 elsewhere."""
    config = tiny({**EVERYTHING, "train.steps": 2, "model.dtype": "auto", "run.folder": str(tmp_path / "a")})
    with monkeypatch.context() as gpu:
        gpu.setattr("ebbtide.model.load.pick_dtype", lambda *_: torch.bfloat16)
        run(config)
    again = tiny({**EVERYTHING, "model.dtype": "auto", "run.folder": str(tmp_path / "a"), "resume": "auto"})
    with pytest.raises(UserError, match=r"are bfloat16, those of this run float32: set `model.dtype: bfloat16`"):
        run(again, find_checkpoint(again, print))


def test_where_resume_looks(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = {**EVERYTHING, "train.steps": 2, "run.name": "mine"}
    assert find_checkpoint(tiny({**fresh, "resume": "auto"}), print) is None
    run(tiny(fresh))
    longer = {**fresh, "train.steps": 3}
    place = Path("runs/mine-001/checkpoints/step-000002")
    for where in ("auto", "runs/mine-001", str(place)):
        assert find_checkpoint(tiny({**longer, "resume": where}), print).path.absolute() == place.absolute()
    monkeypatch.chdir(place.parent)
    for where in (".", place.name, "..", f"../{FOLDER}/{place.name}"):
        # whose grandparent is the run's folder
        assert find_checkpoint(tiny({**longer, "resume": where}), print).path == tmp_path / place
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(tiny(longer), print) is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(tiny({**longer, "resume": "runs/elsewhere"}), print)
    for name in ("mine-2gpu-001", "mine-x-002", "other-003"):  # runs of other names
        shutil.copytree("runs/mine-001", f"runs/{name}")
    assert find_checkpoint(tiny({**longer, "resume": "auto"}), print).path == place
    for number in ("1000", "999"):
        shutil.copytree("runs/mine-001", f"runs/mine-{number}")
    assert find_checkpoint(tiny({**longer, "resume": "auto"}), print).path == Path(
        "runs/mine-1000/checkpoints/step-000002"
    )


def test_a_checkpoint_outside_a_run_is_not_taken_for_one_in_it(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = {**EVERYTHING, "train.steps": 2, "run.name": "mine"}
    run(tiny(fresh))
    shutil.copytree("runs/mine-001/checkpoints/step-000002", "keep/step-000002")
    longer = {**fresh, "train.steps": 3}
    for where in ("keep/step-000002", "keep"):
        with pytest.raises(UserError, match="not in a run's folder"):
            find_checkpoint(tiny({**longer, "resume": where}), print)
    shutil.copytree("keep", "new/checkpoints")
    assert find_checkpoint(tiny({**longer, "resume": "new"}), print).path == tmp_path / "new/checkpoints/step-000002"


def test_later_checkpoints_are_kept_aside_when_a_run_goes_on_from_an_earlier_one(tiny, tmp_path) -> None:
    config = {
        **EVERYTHING,
        "run.folder": str(tmp_path / "a"),
        "checkpoint.every": 1,
        "checkpoint.keep": 2,
        "train.steps": 4,
    }
    straight = run(tiny(config))
    place = tmp_path / "a" / "checkpoints"
    for _ in range(2):
        resumed = find_checkpoint(tiny({**config, "resume": str(place / "step-000003")}), print)
        assert same(run(tiny({**config, "resume": str(place)}), resumed), straight)
    assert sorted(path.name for path in place.iterdir()) == [
        "aside-step-000004",
        "aside-step-000004.2",
        "step-000003",
        "step-000004",
    ]


@pytest.mark.parametrize(
    ("async_save", "problem"),
    [
        (True, OSError("no space left on device")),
        pytest.param(True, RuntimeError("no space left, says torch"), marks=pytest.mark.slow),
        (False, OSError("no space left on device")),
        (False, RuntimeError("no space left, says torch")),
    ],
)
def test_a_write_that_fails_leaves_the_others_and_no_half(two, async_save, problem) -> None:
    full = [True]

    def before(name: str) -> None:
        if full[0] and name == "model.w3":
            raise problem

    made = saver(two, Numbers(before), async_save=async_save)

    def save(step: int) -> None:
        made.save(step, {})
        made.wait()

    with pytest.raises(UserError, match=r"step 3 could not be written.*no space left.*Earlier ones are untouched"):
        save(3)
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2]
    assert all(saved.find_problem() is None for saved in list_checkpoints(two))
    assert not list(two.glob(f"{UNFINISHED}*"))  # which would keep the room that lacks
    full[0] = False
    save(3)
    made.close()
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2, 3]
    assert list_checkpoints(two)[-1].find_problem() is None
    assert not list(two.glob(f"{UNFINISHED}*"))


def test_of_a_full_disk_is_said_what_the_system_says_and_not_what_torch_makes_of_it(two) -> None:
    with (
        room_for(2000),
        pytest.raises(UserError, match=r"step 3 could not be written to .*/c: \[Errno 27\] File too large\. Earlier"),
    ):
        saver(two, Numbers(rows=1000), async_save=False).save(3, {})
    assert sorted(path.name for path in two.iterdir()) == ["step-000001", "step-000002"]


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path) -> None:
    with pytest.raises(UserError, match="step 3 could not be written"):
        saver(tmp_path / "run" / "checkpoints", Numbers(), async_save=False).save(3, {})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_to_is_named(two) -> None:
    blocked = two / "file"
    blocked.write_text("in the way")  # as a read-only folder is to others than root
    with pytest.raises(UserError, match=f"step 3 could not be written to {blocked}"):
        saver(blocked, Numbers(), async_save=False).save(3, {})


def test_the_writing_process_killed_in_the_middle(two) -> None:
    def before(name: str) -> None:
        if name == "model.w3" and made._step == 3:
            made._writer.kill()

    made = saver(two, Numbers(before))
    made.save(3, {})
    with pytest.raises(UserError, match=r"step 3 could not be written.*ended with code -9"):
        made.wait()
    made.save(4, {})
    made.wait()
    made.close()
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2, 4]


def test_a_save_that_waits_copies_one_tensor_at_a_time(two, monkeypatch) -> None:
    """torch copies what is a part of a larger storage, and keeps the copies until the file ends: a second checkpoint
    in memory."""

    def refused(_) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(torch.Tensor, "clone", refused)
    saver(two, Numbers(), async_save=False).save(3, {})
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2, 3]


def test_one_save_at_a_time_and_the_second_waits(two) -> None:
    going, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        going.set()
        go.wait()

    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        assert [saved.step for saved in list_checkpoints(two)] == [1, 2]
        go.set()

    made = Saver(CheckpointConfig(keep=9), two, Numbers(before), say)
    made.save(3, {})
    going.wait()
    made.save(4, {})
    made.wait()
    made.close()
    assert said == ["the checkpoint of step 3 is still being written: waiting for it"]
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2, 3, 4]
    assert all(saved.find_problem() is None for saved in list_checkpoints(two))


def test_a_save_that_is_given_up_leaves_nothing(two) -> None:
    going = threading.Event()
    hold = threading.Event()

    def before(name: str) -> None:
        going.set()
        hold.wait(PATIENCE)

    made = saver(two, Numbers(before))
    made.save(3, {})
    going.wait()
    threading.Timer(0, hold.set).start()
    made.close()
    assert [saved.step for saved in list_checkpoints(two)] in ([1, 2], [1, 2, 3])
    assert all(saved.find_problem() is None for saved in list_checkpoints(two))


def test_the_newest_and_the_best_are_kept(two) -> None:
    for step in (3, 4, 5):
        saver(two, Numbers(), async_save=False).save(step, {"reward": -float(step)})
    prune(two, last=2, best=1, metric="reward")
    assert [saved.step for saved in list_checkpoints(two)] == [1, 4, 5]
    prune(two, last=1, best=0, metric="reward")
    assert [saved.step for saved in list_checkpoints(two)] == [5]


def killed_at(folder: Path, moment: int, async_save: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed"])
    ours, theirs = context.Pipe()
    said, speaking = context.Pipe()
    process = context.Process(target=save_until_killed, args=(folder, moment, async_save, theirs, speaking))
    process.start()
    theirs.close()
    speaking.close()
    finished = []
    with suppress(EOFError):
        while True:
            finished.append(ours.recv())
    process.join()
    assert process.exitcode == -9
    with open(said.fileno(), "rb", closefd=False) as words:
        assert words.read() == b""  # until all that could speak have ended, the process that writes among them
    found = list_checkpoints(folder)
    assert found[-1].step >= finished[-1]
    assert all(saved.find_problem() is None for saved in found)
    assert len(found) >= min(2, len(finished))  # an old one is never lost before the new one is there
    for saved in found:
        weights = {"model.w2": torch.zeros(2, 3, dtype=torch.bfloat16)}
        TensorReader(CheckpointFiles(saved.path)).read(weights)
        assert (weights["model.w2"] == saved.step).all()
    again = saver(folder, Numbers(), async_save=False)
    again.save(found[-1].step + 1, {})
    assert not list(folder.glob(f"{UNFINISHED}*"))  # what was cut short is cleared away


@pytest.mark.parametrize("number", range(50))
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path, number, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the server that they are forked from
    killed_at(tmp_path, 1 + number, async_save=False)


@pytest.mark.parametrize("moment", [3, 8, 10, 24])  # two of them while tensors are given away
def test_killed_while_another_process_writes(tmp_path, moment, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    killed_at(tmp_path, moment, async_save=True)


def test_export_is_an_ordinary_model(tiny, tmp_path) -> None:
    config = tiny({**EVERYTHING, "train.steps": 2, "model.dtype": "bfloat16", "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        trained = train(config, report)
    export(tmp_path / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    mine = trained.model.state_dict()
    assert all(torch.equal(mine[key], value) for key, value in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12=").input_ids == trained.tokenizer("12=").input_ids
    with pytest.raises(UserError, match="not empty"):
        export(tmp_path / "run", tmp_path / "out")
    with room_for(2000), pytest.raises(UserError, match=r"cannot be written to .*new: .*File too large"):
        export(tmp_path / "run", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export(tmp_path / "run", tmp_path / "link")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "empty").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "out", "run"]
    with pytest.raises(UserError, match="no complete checkpoint of step 9"):
        export(tmp_path / "run", tmp_path / "nine", 9)


def model_with_buffers(folder: Path) -> None:
    """A mixture of experts whose router has a bias that is no parameter, saved with one that is not what a new model
    has."""
    tokenizer = scratch_tokenizer("0123456789=")
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **shape), dtype=torch.float32)
    model.get_buffer(BIAS).copy_(torch.tensor([1.01, -0.33, 0.52, -1.07]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_are_exported_and_served_as_they_were_trained_with(tiny, tmp_path, dtype) -> None:
    model_with_buffers(tmp_path / "made")
    model = {"path": str(tmp_path / "made"), "dtype": dtype}
    config = tiny({"model": model, "train.steps": 1, "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        trained = train(config, report).model
    export(tmp_path / "run", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    served, _ = serve_run.load_served(str(tmp_path / "run"), ServeConfig(device="cpu", dtype=dtype), print)
    assert trained.get_buffer(BIAS).tolist() == pytest.approx([1.01, -0.33, 0.52, -1.07], abs=1e-6)
    for found in (exported, served.model):
        for name, tensor in [*trained.state_dict().items(), *trained.named_buffers()]:
            mine = found.get_buffer(name) if name not in found.state_dict() else found.state_dict()[name]
            assert torch.equal(mine, tensor), name
    for file in (tmp_path / "made").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=r"e_score_correction_bias.*`model.path: .*made`"):
        export(tmp_path / "run", tmp_path / "again")


def test_a_run_of_a_family_without_a_known_list_of_blocks_is_served(tiny, tmp_path) -> None:
    tokenizer = scratch_tokenizer("0123456789=+ ")
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": len(tokenizer)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape, **ends)).save_pretrained(tmp_path / "made")
    tokenizer.save_pretrained(tmp_path / "made")
    model = {"path": str(tmp_path / "made"), "dtype": "float32"}
    config = tiny({"model": model, "train.steps": 1, "run.folder": str(tmp_path / "run")})
    with Report(config, "test") as report:
        trained = train(config, report).model
    served, _ = serve_run.load_served(str(tmp_path / "run"), ServeConfig(device="cpu"), print)
    assert all(torch.equal(one, trained.get_parameter(name)) for name, one in served.model.named_parameters())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keeper(tiny, tmp_path, **options):
    """(a keeper whose state writes nothing, its clock)."""
    clock = Clock()
    config = tiny({"checkpoint": {"every": None, "async_save": False, **options}, "train.steps": 100})
    return Checkpointer(config, Saver(config.checkpoint, tmp_path, Numbers(), print), print, clock), clock


def test_a_checkpoint_is_due_after_so_many_minutes(tiny, tmp_path) -> None:
    made, clock = keeper(tiny, tmp_path, minutes=1.0)
    due = []
    for step in range(1, 8):
        clock.now += 25
        if made.step_done(step):
            made.save(step, {})
            due.append(step)
    assert due == [3, 6]
    assert made.step_done(100)  # and after the last step
    assert not made.stopping


def test_a_run_stops_before_its_deadline(tiny, tmp_path) -> None:
    made, clock = keeper(tiny, tmp_path, deadline_minutes=10.0)
    for step in range(1, 100):
        clock.now += 60
        if made.step_done(step):
            break
    assert made.stopping
    assert clock.now == 540  # another step of 60 s, half as long again, would end after 600 s


def test_what_the_first_save_took_counts_for_the_deadline_at_once(tiny, tmp_path, monkeypatch) -> None:
    made, clock = keeper(tiny, tmp_path, every=3, deadline_minutes=10.0)
    save = Saver.save
    monkeypatch.setattr(
        Saver, "save", lambda *args, **options: (setattr(clock, "now", clock.now + 240), save(*args, **options))
    )
    for step in range(1, 4):
        clock.now += 60
        due = made.step_done(step)
    assert (due, made.stopping) == (True, False)
    made.save(3, {})
    assert made.stopping  # another step, and another save of 240 s, would end after 600 s


def test_the_first_signal_waits_for_the_step_and_the_second_does_not(tiny, tmp_path) -> None:
    made, _ = keeper(tiny, tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with made:
        assert not made.step_done(2)
        signal.raise_signal(signal.SIGTERM)
        assert not made.stopping  # step 2 is not to be saved, so the run does not end with it
        assert made.step_done(3)
        assert made.stopping
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


class TellsWhenGivenUp(Saver):
    def __init__(self, *given: object) -> None:
        self.given_up = threading.Event()
        super().__init__(*given)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_abandoned" and value:
            self.given_up.set()


def test_a_second_ctrl_c_ends_a_save_that_the_run_waits_for(tiny, two) -> None:
    filled: list[str] = []

    def before(name: str) -> None:
        filled.append(name)
        if len(filled) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            saver.given_up.wait(PATIENCE)

    config = tiny({"checkpoint": {"every": None, "keep": 9, "async_save": False}, "train.steps": 100})
    saver = TellsWhenGivenUp(config.checkpoint, two, Numbers(before), print)
    made = Checkpointer(config, saver, print)
    with pytest.raises(KeyboardInterrupt), made:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        made.save(3, {})
    assert len(filled) == 1 < len(Numbers().snapshot(0, copy=False).entries)
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2]


def test_a_ctrl_c_that_comes_as_a_wait_begins_is_heard(tiny, two) -> None:
    """Python has looked for signals by then, and looks again when the wait returns."""

    class Missed(threading.Event):
        """As if it had come so: it is delivered when a wait has returned."""

        delivered = False

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None or self.is_set(), "it waits for a save that waits for it"
            found = super().wait(0.0)
            if not found and not self.delivered:
                self.delivered = True
                signal.raise_signal(signal.SIGINT)
            return found

    def before(name: str) -> None:
        saver.given_up.wait(PATIENCE)

    config = tiny({"checkpoint": {"every": None, "keep": 9, "async_save": False}, "train.steps": 100})
    saver = TellsWhenGivenUp(config.checkpoint, two, Numbers(before), print)
    saver._idle = Missed()
    saver._idle.set()
    made = Checkpointer(config, saver, print)
    with pytest.raises(KeyboardInterrupt), made:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        made.save(3, {})
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2]


def test_after_a_second_ctrl_c_nothing_writes_any_more(tiny, two, monkeypatch) -> None:
    going, ended = threading.Event(), threading.Event()

    def before(name: str) -> None:
        going.set()
        ended.wait()

    kill = Writer.kill
    monkeypatch.setattr(Writer, "kill", lambda writer: (kill(writer), ended.set()))
    config = tiny({"checkpoint": {"every": None, "keep": 9}, "train.steps": 100})
    made = Checkpointer(config, Saver(config.checkpoint, two, Numbers(before), print), print)
    with pytest.raises(KeyboardInterrupt), made:  # noqa: PT012
        made.save(3, {})
        going.wait()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert made._saver._idle.is_set()
    assert made._saver._writer is None
    assert [saved.step for saved in list_checkpoints(two)] == [1, 2]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_been(tmp_path) -> None:
    """kill -9 in the middle of a step or a save, then the same command again."""
    options = [
        "train.steps=6",
        "checkpoint.every=1",
        "evaluate=null",
        "report.samples_every=0",
        "rollout.prompts_per_step=4",
    ]

    def command(name: str) -> list[str]:
        return [
            sys.executable,
            "-u",
            "-m",
            "ebbtide",
            "train",
            "quickstart",
            f"run.folder={tmp_path / name}",
            "resume=auto",
            *options,
        ]

    process = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/6"):
            process.kill()
            break
    process.wait()
    assert list_checkpoints(tmp_path / "killed" / "checkpoints")[-1].step < 6
    for name in ("killed", "straight"):
        subprocess.run(command(name), check=True, capture_output=True)
    ends = []
    for name in ("killed", "straight"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        ends.append([{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines])
        export(tmp_path / name, tmp_path / f"{name} out", 6)
    assert ends[0] == ends[1]
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} out").state_dict() for name in ("killed", "straight")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
