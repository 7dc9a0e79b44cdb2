"""A snapshot stays as it was while the run goes on; several ranks write and read one checkpoint."""

import json
import random
import threading
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.errors import UserError
from patience import PATIENCE
from saved import contents, equal, made, read
from toy import one_step

MODES = {
    "device": {},
    "device, lean": {"memory": MemoryConfig(preset="lean")},
    "streamed": {"place": "streamed"},
    "cpu": {"place": "cpu"},
    "split": {"cpu_fraction": 0.4},
    "split, lean": {"cpu_fraction": 0.4, "memory": MemoryConfig(preset="lean")},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_snapshot_stays_while_the_run_goes_on(mode, share) -> None:
    state, model, residency, optimizer = made(**MODES[mode])
    wanted = contents(model, optimizer)
    with residency.phase("save"):
        snapshot = state.snapshot(3, copy=True)
    names = {entry.name for entry in snapshot.entries if random.Random(entry.name).random() < share}
    found = read(snapshot, names)  # some of it is written before the next step comes
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        one_step(model, residency, optimizer, torch.randint(31, (2, 2, 8), generator=generator))
    assert not equal(contents(model, optimizer), wanted)
    found |= read(snapshot, {entry.name for entry in snapshot.entries} - names)
    assert equal(found, wanted)
    assert not any(holding.readers for holding in residency._holdings.values())


def test_where_memory_is_short_the_step_waits_for_the_disk(monkeypatch) -> None:
    state, model, residency, optimizer = made(place="cpu")
    wanted = contents(model, optimizer)
    snapshot = state.snapshot(3, copy=True)
    asked = threading.Event()
    monkeypatch.setattr("ebbtide.checkpoint.state.free_host_bytes", lambda: asked.set() or 0)
    step = threading.Thread(target=one_step, args=(model, residency, optimizer, torch.randint(31, (2, 2, 8))))
    step.start()
    asked.wait()
    assert equal(read(snapshot), wanted)
    step.join()
    assert not equal(contents(model, optimizer), wanted)


def test_what_is_away_is_not_brought_back_for_a_save() -> None:
    state, _, residency, _ = made(memory=MemoryConfig(preset="lean"))
    with residency.phase("evaluate"):
        pass
    residency.mover.drain()
    with residency.phase("save"):
        read(state.snapshot(3, copy=True))
        assert residency.holdings()["moments"].device == 0
    assert residency.mover.drain().bytes_in == 0


def test_random_states_come_back(tmp_path) -> None:
    state, *_ = made()
    saver = Saver(CheckpointConfig(async_save=False), tmp_path, state, print)
    random.seed(5)
    numpy.random.seed(6)
    torch.manual_seed(7)
    saver.save(1, {})

    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    wanted = drawn()
    assert drawn() != wanted
    state.load(list_checkpoints(tmp_path)[0].path, load_rng=True)
    assert drawn() == wanted
    state.load(list_checkpoints(tmp_path)[0].path, load_rng=False)
    assert drawn() != wanted


def test_closing_waits_for_the_thread_that_wrote(tmp_path) -> None:
    """When the checkpoint is there, the thread still frees tensors: a process that ends meanwhile aborts."""
    state, *_ = made()
    saver, freed = Saver(CheckpointConfig(async_save=False), tmp_path, state, print), threading.Event()

    class Idle(threading.Event):
        def set(self) -> None:
            super().set()
            freed.wait(PATIENCE)

    saver._idle = Idle()
    threading.Event.set(saver._idle)
    saver.save(1, {})
    closing = threading.Thread(target=saver.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    freed.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_save_that_fails_lets_go_of_what_it_held(tmp_path) -> None:
    state, model, residency, optimizer = made(place="cpu")
    (tmp_path / "file").write_text("in the way")
    saver = Saver(CheckpointConfig(), tmp_path / "file", state, print)
    saver.save(1, {})
    with pytest.raises(UserError, match="could not be written"):
        saver.wait()
    assert not any(holding.readers for holding in residency._holdings.values())
    one_step(model, residency, optimizer, torch.randint(31, (2, 2, 8)))


def ranks_save_and_load(rank: int, count: int, folder: str, parallel: bool, begin: bool) -> None:
    """What each of some ranks does: begins or takes up what is there, checks it, and saves the next step."""
    if count > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting-{count}-{begin}", rank=rank, world_size=count
        )
    state, model, _, optimizer = made(place="cpu" if count > 1 else "device")
    if not begin:
        for parameter in model.parameters():
            parameter.data.zero_()
        saved = list_checkpoints(Path(folder))[-1]
        assert saved.find_problem() is None
        assert state.load(saved.path, load_rng=True, parallel=parallel) == saved.step
        wanted = torch.load(f"{folder}/wanted.pt")
        assert equal(contents(model, optimizer), wanted)
    elif rank == 0:
        torch.save(contents(model, optimizer), f"{folder}/wanted.pt")
    random.seed(100 + rank)
    saver = Saver(CheckpointConfig(keep=9, fully_parallel_save=parallel), Path(folder), state, print)
    saver.save(1 if begin else list_checkpoints(Path(folder))[-1].step + 1, {})
    saver.wait()
    saver.close()
    if count > 1:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_two_ranks_then_one_then_two(tmp_path, parallel) -> None:
    for count, begin in ((2, True), (1, False), (2, False)):
        torch.multiprocessing.spawn(ranks_save_and_load, (count, str(tmp_path), parallel, begin), nprocs=count)
    written = [
        sorted(path.name for path in (saved.path / "tensors").glob("*.distcp")) for saved in list_checkpoints(tmp_path)
    ]
    both = {name.split("_")[2] for name in written[0]}
    assert both == ({"0", "1"} if parallel else {"0"})
    assert {name.split("_")[2] for name in written[1]} == {"0"}
    assert len(list_checkpoints(tmp_path)) == 3
    first = list_checkpoints(tmp_path)[0].path
    assert json.loads((first / "run.json").read_text())["world"] == 2
    states = [json.loads((first / f"random-{rank:05d}.json").read_text())["python"] for rank in range(2)]
    assert states[0] != states[1]
