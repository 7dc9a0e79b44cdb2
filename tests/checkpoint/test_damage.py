"""A checkpoint that was cut, edited or made by someone else: what is wrong is said, and nothing in it runs."""

import hashlib
import io
import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from typer import Exit

from ebbtide.checkpoint.contents import CONFIG, RUN, random_name
from ebbtide.checkpoint.export import pick_checkpoint, read_model
from ebbtide.checkpoint.index import METADATA, TENSORS, read_index
from ebbtide.checkpoint.manifest import MANIFEST, CheckpointFiles, DamagedCheckpoint
from ebbtide.checkpoint.resume import find_checkpoint, with_saved_choices
from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.store import list_checkpoints, newest_valid
from ebbtide.checkpoint.tensors import TensorReader
from ebbtide.cli import checkpoints
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.serve import ServeConfig
from ebbtide.errors import UserError
from ebbtide.launch import serve as serve_run
from killed import Numbers, saver
from saved import made

PART = f"{TENSORS}/__0_0.distcp"


def put(path: Path, name: str, data: bytes) -> None:
    """A file of a checkpoint with other contents, by someone who mends the manifest as well."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(manifest))


def edited(path: Path, name: str, change) -> None:
    tree = json.loads((path / name).read_text())
    change(tree)
    put(path, name, json.dumps(tree).encode()) if name != MANIFEST else (path / name).write_text(json.dumps(tree))


def within(name, change):
    return lambda path: edited(path, name, change)


def manifest(change):
    return within(MANIFEST, change)


def files(change):
    return manifest(lambda tree: change(tree["files"]))


def holds(name, data):
    """Only in the file: the manifest is as it was."""
    return lambda path: (path / name).write_bytes(data(path) if callable(data) else data)


def mended(name, data):
    return lambda path: put(path, name, data)


def linked(path: Path) -> None:
    (path / RUN).rename(path.parent / "elsewhere")
    (path / RUN).symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / RUN).unlink()
    os.mkfifo(path / RUN)


BOMB = b"a0: &a0 {x: 1}\n" + b"".join(b"a%d: &a%d {x: *a%d, y: *a%d}\n" % (n, n, n - 1, n - 1) for n in range(1, 40))
GROUP = {"prompt": 0, "tokens": [1], "step": 1, "seeds": [7], "samples": [[[1], [0.0], [0.0], None]]}
HALF = {**GROUP, "samples": [[[1, 2], [0.0], [0.0], None]]}
NOT_WRITTEN = "is not what a run writes"
DAMAGE = {
    "truncated": (holds(PART, lambda path: (path / PART).read_bytes()[:-1]), "__0_0.distcp has"),
    "flipped bit": (holds(PART, lambda path: (path / PART).read_bytes()[:-1] + b"!"), "has other contents"),
    "missing": (lambda path: (path / PART).unlink(), "__0_0.distcp is missing"),
    "a link out of the folder": (linked, "run.json is a link that leads out"),
    "a pipe": (pipe, "run.json is not a regular file"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (holds(MANIFEST, b'{"step": 2, "fil'), f"manifest.json {NOT_WRITTEN}: Invalid JSON"),
    "a manifest of bytes": (holds(MANIFEST, b"\xff\xfe"), f"manifest.json {NOT_WRITTEN}"),
    "a deep manifest": (holds(MANIFEST, b"[" * 10_000), f"manifest.json {NOT_WRITTEN}"),
    "no digest": (files(lambda tree: tree[RUN].pop("sha256")), "files.run.json.sha256: Field required"),
    "a size that is text": (files(lambda tree: tree[RUN].update(size="12")), "files.run.json.size: Input should be"),
    "files in a list": (manifest(lambda tree: tree.update(files=[RUN])), "files: Input should be"),
    "no files": (files(lambda tree: tree.clear()), "files: Dictionary should have at least 1 item"),
    "a metric that is text": (manifest(lambda tree: tree["metrics"].update(reward="x")), "metrics.reward: Input"),
    "another step": (manifest(lambda tree: tree.update(step=1)), "manifest.json is of step 1"),
    "a file above it": (files(lambda tree: tree.update({"../x": tree[RUN]})), "files.../x.[key]: String should match"),
    "an absolute file": (files(lambda tree: tree.update({"/x": tree[RUN]})), "files./x.[key]: String should match"),
    "escapes": (files(lambda tree: tree.update({"\x1b[2J": tree[RUN]})), r"files.\x1b[2J.[key]: String should"),
    "a config that is not listed": (files(lambda tree: tree.pop(CONFIG)), "does not list config.yaml"),
    "tensors that are not listed": (files(lambda tree: tree.pop(PART)), "which the manifest does not list"),
    "random states that are not listed": (files(lambda tree: tree.pop(random_name(0))), "does not list random-00000"),
    "an empty config": (mended(CONFIG, b""), f"config.yaml {NOT_WRITTEN}: it has no settings"),
    "a config of aliases": (mended(CONFIG, BOMB), f"config.yaml {NOT_WRITTEN}: config.yaml is not"),
    "a config with an object": (mended(CONFIG, b"a: !!python/name:os.system"), f"config.yaml {NOT_WRITTEN}"),
    "a deep config": (mended(CONFIG, b"[\n" * 1000), f"config.yaml {NOT_WRITTEN}"),
    "an empty run": (mended(RUN, b"{}"), f"run.json {NOT_WRITTEN}: step: Field required"),
    "a run of another step": (within(RUN, lambda tree: tree.update(step=1)), "run.json is of step 1"),
    "a place before the data": (within(RUN, lambda tree: tree["sampler"].update(position=-1)), "sampler.position"),
    "half a group": (within(RUN, lambda tree: tree.update(rollouts=[HALF])), "rollouts.0: Value error"),
    "a group of later": (within(RUN, lambda tree: tree.update(rollouts=[{**GROUP, "step": 3}])), "in a later step"),
    "a seed below 0": (
        within(RUN, lambda tree: tree.update(rollouts=[{**GROUP, "seeds": [-1]}])),
        "rollouts.0.seeds.0",
    ),
    "a log-prob that is none": (
        within(RUN, lambda tree: tree.update(rollouts=[{**GROUP, "samples": [[[1], [float("inf")], [0.0], None]]}])),
        "rollouts.0.samples.0.1.0",
    ),
    "numpy's position": (within(random_name(0), lambda tree: tree["numpy"].__setitem__(2, 10**6)), "numpy.2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(two, kind, capsys) -> None:
    damage, words = DAMAGE[kind]
    damage(two / "step-000002")
    said: list[str] = []
    assert newest_valid(lambda: list_checkpoints(two), said.append).step == 1
    assert "step-000002 is damaged (" in said[0]
    assert words in said[0]
    assert "going back to the one before" in said[0]
    assert "\x1b" not in said[0]
    two.rename(two.parent / "checkpoints")
    with pytest.raises(Exit) as ended:
        checkpoints(two.parent, verify=True)
    assert ended.value.exit_code == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("  verified")
    assert "  damaged (" in second


def test_a_damaged_one_is_no_hindrance_to_those_after_it(two) -> None:
    """One that is of no use is neither counted among those to keep nor removed."""
    edited(two / "step-000001", MANIFEST, lambda tree: tree["metrics"].update(reward="high"))
    made = saver(two, Numbers(), async_save=False)
    made._config = made._config.model_copy(update={"keep": 2, "keep_best": 1})
    for step in (3, 4):
        made.save(step, {"reward": float(step)})
    assert [(saved.step, saved.find_problem() is None) for saved in list_checkpoints(two)] == [
        (1, False),
        (3, True),
        (4, True),
    ]


def test_export_takes_the_one_before_and_refuses_a_damaged_one_that_is_asked_for(two) -> None:
    two.rename(two.parent / "checkpoints")
    put(two.parent / "checkpoints" / "step-000002", RUN, b"{}")
    said: list[str] = []
    assert pick_checkpoint(two.parent, None, said.append).step == 1
    assert "step-000002 is damaged" in said[0]
    with pytest.raises(UserError, match=r"step-000002 is damaged \(run.json.*choose another"):
        pick_checkpoint(two.parent, 2, said.append)


class Runs:
    """In a pickle: makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with one checkpoint of a toy model."""
    state, *_ = made()
    (tmp_path / "run").mkdir()
    Saver(CheckpointConfig(async_save=False), tmp_path / "run" / "checkpoints", state, print).save(1, {})
    return tmp_path / "run"


def changed(path: Path, change) -> None:
    """Torch's own list of the tensors, with a change."""
    found = pickle.loads((path / METADATA).read_bytes())
    change(found)
    put(path, METADATA, pickle.dumps(found))


def test_a_foreign_checkpoint_runs_no_code(run, tiny) -> None:
    """Neither where it is chosen nor where it is read."""
    marker, (saved,) = run / "it ran", list_checkpoints(run / "checkpoints")
    changed(saved.path, lambda found: setattr(found, "storage_meta", Runs(marker)))
    said: list[str] = []
    with pytest.raises(UserError, match="no complete checkpoint"):
        pick_checkpoint(run, None, said.append)
    with pytest.raises(UserError, match="no complete checkpoint"):
        serve_run.load_served(str(run), ServeConfig(device="cpu"), said.append)
    with pytest.raises(UserError, match="every checkpoint there is damaged"):
        find_checkpoint(tiny({"resume": str(run)}), said.append)
    assert len(said) == 3
    for words in said:
        assert "it names posix.mkdir, and loading it would run that code): there is none before it" in words
    state, *_ = made()
    for read in (lambda: read_model(saved), lambda: state.load(saved.path, load_rng=True)):
        with pytest.raises(DamagedCheckpoint, match=r"it names posix.mkdir"):
            read()
    assert not marker.exists()


PICKLES = {
    "an attribute": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x05torch\x8c\x04Size\x93\x8c\x05index\x86R.",
    "a class changed": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N}\x8c\x05index\x8c\x01xs\x86b.",
    "an old opcode": b"cposix\nmkdir\n(S'x'\ntR.",
    "a memo of 32 GiB": b"\x80\x04Nr\xff\xff\xff\xff.",
    "bytes without end": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",
    "no object": b"\x80\x04N.",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_that_torch_does_not_write(two, kind) -> None:
    put(two / "step-000002", METADATA, PICKLES[kind])
    assert "tensors/.metadata is not what a run writes: " in list_checkpoints(two)[1].find_problem()


def place(found):
    return next(iter(found.storage_data.values()))


def tensor(found):
    return found.state_dict_metadata["model.w3"]


def of_part(**fields):
    return lambda found: tensor(found).chunks[0].__dict__.update(fields)


def of_place(**fields):
    return lambda found: place(found).__dict__.update(fields)


LISTS = {
    "above": (of_place(relative_path="../run.json"), "which the manifest does not list"),
    "absolute": (of_place(relative_path="/etc/passwd"), "which the manifest does not list"),
    "past the end": (of_place(length=10**6), "ends after the end of"),
    "before the start": (of_place(offset=-1), "a size has the wrong type"),
    "packed": (of_place(transform_descriptors=["stream.zstd"]), "which no run does"),
    "no part": (lambda found: tensor(found).chunks.clear(), "model.w3 is incomplete"),
    "a part of nothing": (of_part(offsets=torch.Size([9, 9])), "a part of model.w3 is in no file"),
    "too large": (of_part(sizes=torch.Size([9, 3])), "larger than the whole"),
    "no weights": (lambda found: found.state_dict_metadata.clear(), "it has no weights"),
    "no sizes": (lambda found: setattr(tensor(found), "size", "large"), "size has the wrong type"),
    "no fields": (lambda found: found.__dict__.pop("storage_data"), "storage_data is missing"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_tensors_that_no_run_writes(two, kind) -> None:
    change, words = LISTS[kind]
    changed(two / "step-000002", change)
    assert words in list_checkpoints(two)[1].find_problem()


def test_whatever_bytes_are_there_it_is_read_or_damaged(two) -> None:
    path, draw = two / "step-000002", random.Random(0)
    whole = (path / METADATA).read_bytes()
    damaged = 0
    for _ in range(120):
        data = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        put(path, METADATA, bytes(data))
        try:
            read_index(CheckpointFiles(path))
        except DamagedCheckpoint:
            damaged += 1
    assert damaged > 80


def test_enums_are_read_as_every_python_writes_them(two, monkeypatch) -> None:
    path = two / "step-000002"
    wanted = read_index(CheckpointFiles(path))
    by_name = lambda one, _: (getattr, (type(one), one.name))  # noqa: E731
    monkeypatch.setattr(torch_metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    changed(path, lambda found: None)
    assert b"getattr" in (path / METADATA).read_bytes()
    assert read_index(CheckpointFiles(path)) == wanted


def payload(found: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("found", ["code", torch.ones(3, 3), torch.ones(9, 9, dtype=torch.bfloat16), {"a": 1}, None])
def test_files_with_something_else_in_the_place_of_a_tensor(two, found) -> None:
    path, marker = two / "step-000002", two / "it ran"
    data = payload(Runs(marker) if found == "code" else found) if found is not None else b"nothing"
    put(path, PART, data)

    def change(found) -> None:
        for one in found.storage_data.values():
            one.offset, one.length = 0, len(data)

    changed(path, change)
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp has .*model.w3"):
        TensorReader(CheckpointFiles(path)).read({"model.w3": torch.zeros(3, 3, dtype=torch.bfloat16)})
    assert not marker.exists()


@pytest.mark.parametrize("text", ["memory: 5\n", "optimizer: {place: nowhere}\n", "memory: [preset]\n"])
def test_what_a_plan_had_chosen_is_checked(two, tiny, text) -> None:
    put(two / "step-000002", CONFIG, text.encode())
    with pytest.raises(UserError, match=r"step-000002 is damaged \(config.yaml is not valid: "):
        with_saved_choices(tiny({"memory.plan": "auto"}), list_checkpoints(two)[1])


def test_a_place_in_the_data_that_is_not_there(run) -> None:
    (saved,) = list_checkpoints(run / "checkpoints")
    edited(saved.path, RUN, lambda tree: tree["sampler"].update(position=4))
    state, *_ = made()
    with pytest.raises(UserError, match="is at item 4 of an epoch, but this run has 3 problems or examples"):
        state.load(saved.path, load_rng=True)


def test_random_states_where_the_first_checkpoints_had_them(run) -> None:
    (saved,) = list_checkpoints(run / "checkpoints")
    states = json.loads((saved.path / random_name(0)).read_text())
    edited(saved.path, RUN, lambda tree: [tree.pop("world"), tree.pop("rollouts"), tree.update(random=states)])
    edited(saved.path, MANIFEST, lambda tree: tree["files"].pop(random_name(0)))
    wanted = random.random()
    state, *_ = made()
    assert saved.find_problem() is None
    assert state.load(saved.path, load_rng=True) == 1
    assert random.random() == wanted


def test_one_that_a_run_removes_while_it_is_read_is_not_called_damaged(two) -> None:
    """A run that goes on removes the old ones: what is there then is looked at anew."""
    said: list[str] = []
    first, second = list_checkpoints(two)
    looks = iter([[first, replace(second, path=two / "step-000009")], [first, second]])
    assert newest_valid(lambda: next(looks), said.append) == second
    assert said == []
