"""Ranks that only generate: the run is the one that those that train would have had alone, to the bit."""

import json
import os
import signal
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from ranks import next_port, run, runs, together
from test_launch import command
from test_training import BASE, agree

from conftest import TINY, merged
from ebbtide.checkpoint.store import list_checkpoints
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import RunStopped
from ebbtide.launch.job import Job
from ebbtide.rollout.weights.channel import RolloutChannel, buckets
from patience import PATIENCE
from test_loop import EVERYTHING, MEASURED


def config(folder, parallel, changes=None):
    return GrpoConfig.model_validate(
        merged(TINY, {**BASE, **(changes or {}), "parallel": parallel, "run.folder": str(folder)})
    )


def same(mine, theirs) -> None:
    """Figures, completions and weights."""
    agree(mine, theirs)
    for line, other in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert {key: value for key, value in line.items() if not key.startswith(MEASURED)} == {
            key: value for key, value in other.items() if not key.startswith(MEASURED)
        }
    for name, weight in mine["weights"].items():
        numpy.testing.assert_array_equal(weight, theirs["weights"][name], err_msg=name)


@pytest.mark.slow
def test_the_run_is_the_same_to_the_bit(tmp_path) -> None:
    """As many generate as train, so that each has the requests that one would have had alone; and one for two, where
    a larger batch may round otherwise."""
    alone = config(tmp_path / "one", None, EVERYTHING)
    one_and_one = config(tmp_path / "one and one", {"gpus": 1, "rollout_gpus": 1}, EVERYTHING)
    two = config(tmp_path / "two", {"gpus": 2}, EVERYTHING)
    two_and_two = config(tmp_path / "two and two", {"gpus": 2, "rollout_gpus": 2}, EVERYTHING)
    short = {**EVERYTHING, "train.steps": 1}
    tensor = config(tmp_path / "tensor", {"tensor": 2, "gpus": 2}, short)
    tensor_and_one = config(tmp_path / "tensor and one", {"tensor": 2, "gpus": 2, "rollout_gpus": 1}, short)

    of_two = together(2, runs, [one_and_one, two, tensor])[0]
    same(of_two[0], together(1, run, alone)[0])
    for rank in together(4, run, two_and_two)[:2]:
        same(rank, of_two[1])
    agree(together(3, run, tensor_and_one)[0], of_two[2])


@pytest.mark.slow
def test_a_checkpoint_is_of_those_that_train(tmp_path) -> None:
    """With ranks that generate, without, and with them again: as if nothing had been."""
    stages = [{"gpus": 1, "rollout_gpus": 1}, None, {"gpus": 1, "rollout_gpus": 2}]
    wanted = together(1, run, config(tmp_path / "alone", None, {"train.steps": 3}))[0]
    for step, parallel in enumerate(stages, start=1):
        count = sum(parallel.values()) if parallel else 1
        some = config(tmp_path / "moving", parallel, {"train.steps": step, "checkpoint": {"every": None}})
        found = together(count, run, some, str(tmp_path / "moving") if step > 1 else None)[0]
    same(found, wanted)
    saved = list_checkpoints(tmp_path / "moving" / "checkpoints")[-1]
    assert json.loads((saved.path / "run.json").read_text())["world"] == 1


def counted(rank, some):
    """Orders, how often weights went along, and the addresses they went to."""
    orders, addresses = [], []
    ordered, receive = RolloutChannel.broadcast_request, RolloutChannel.receive
    RolloutChannel.broadcast_request = lambda link, order=None: orders.append(ordered(link, order)) or orders[-1]

    def received(link, weights):
        weights = list(weights)
        addresses.append([weight.data_ptr() for weight in weights])
        receive(link, weights)

    RolloutChannel.receive = received
    run(rank, some)
    return [order if order is None else order.sends_weights for order in orders], addresses


@pytest.mark.slow
def test_weights_are_sent_when_they_have_changed_and_stay_where_they_are(tmp_path) -> None:
    """Evaluation, then a step and evaluation, twice: all that follows an update sends."""
    some = config(tmp_path / "run", {"gpus": 1, "rollout_gpus": 1}, {"evaluate": {"every": 1, "problems": 2}})
    (orders, _), (heard, addresses) = together(2, counted, some)
    assert orders == heard == [True, False, True, False, True, None]
    assert len(addresses) == 3
    assert all(address == addresses[0] for address in addresses)


def sent_sizes(rank, configs):
    """The bytes of weights that go to those that generate, call by call, and what each run gives."""
    found, send, receive = [], RolloutChannel.send, RolloutChannel.receive

    def counts(transfer):
        def counted(link, weights):
            weights = list(weights)
            sizes.append(sum(weight.numel() * weight.element_size() for weight in weights))
            transfer(link, weights)

        return counted

    RolloutChannel.send, RolloutChannel.receive = counts(send), counts(receive)
    for some in configs:
        sizes: list[int] = []
        found.append((sizes, run(rank, some)))
    return found


@pytest.mark.slow
def test_an_update_sends_adapters_alone(tmp_path) -> None:
    """A base that is in files is never sent; one that is random, on which ranks may differ, is sent once."""
    from ebbtide.model.load import load_model

    scratch = {"model.lora": {"rank": 2}, "loss.kl": {"coefficient": 0.1}, "train.steps": 3}
    loaded = load_model(config(tmp_path, None))
    loaded.model.save_pretrained(tmp_path / "base")
    loaded.tokenizer.save_pretrained(tmp_path / "base")
    files = {**scratch, "model": {"path": str(tmp_path / "base"), "lora": {"rank": 2}}}
    beside = [
        config(tmp_path / f"two {name}", {"gpus": 1, "rollout_gpus": 1}, one)
        for name, one in ((1, scratch), (2, files))
    ]
    alone = [config(tmp_path / f"one {name}", None, one) for name, one in ((1, scratch), (2, files))]
    (wanted,) = together(1, runs, alone)
    mine, theirs = together(2, sent_sizes, beside)
    adapters = sum(weight.nbytes for name, weight in wanted[0]["weights"].items() if ".lora_" in name)
    whole = sum(weight.nbytes for weight in wanted[0]["weights"].values())
    assert 0 < adapters < whole / 4
    assert (
        [sizes for sizes, _ in mine] == [sizes for sizes, _ in theirs] == [[whole, adapters, adapters], [adapters] * 3]
    )
    for (_, found), other in zip(mine, wanted, strict=True):
        same(found, other)


def linked(rank):
    """Parameters of many sizes and two types, from one rank to two others in buckets of 40 bytes."""
    from datetime import timedelta

    from torch.distributed.rendezvous import rendezvous

    next_port()
    store, _, _ = next(rendezvous("env://"))
    link = RolloutChannel(store, rank, 1, 2, torch.device("cpu"), timedelta(seconds=PATIENCE))
    shapes = [(3,), (2, 4), (7, 11), (1,), (5,), (2, 2), (9,)]
    kinds = [torch.float32] * 4 + [torch.bfloat16] * 3
    weights = [torch.nn.Parameter(torch.zeros(shape, dtype=kind)) for shape, kind in zip(shapes, kinds, strict=True)]
    sent = [
        torch.full(shape, number + 0.5, dtype=kind)
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    if rank == 0:
        link.send([torch.nn.Parameter(tensor) for tensor in sent], bucket=40)
    else:
        link.receive(weights, bucket=40)
    answers = link.gather_completions(f"rank {rank}")
    link.end(stopped=False) if rank == 0 else link.broadcast_request()
    return rank == 0 or all(torch.equal(weight, tensor) for weight, tensor in zip(weights, sent, strict=True)), answers


def test_the_link(tmp_path) -> None:
    assert together(3, linked) == [(True, ["rank 1", "rank 2"])] * 3


def slow(rank, hangs):
    """Rank 1 has nothing to do. Rank 2 is looked for twice as long as ranks wait for each other, and says each time
    that it is there; or hangs, in its work or before it."""
    from datetime import timedelta

    from torch.distributed.rendezvous import rendezvous

    from ebbtide.rollout.weights import channel as module

    next_port()
    store, _, _ = next(rendezvous("env://"))
    link = RolloutChannel(store, rank, 1, 2, torch.device("cpu"), timedelta(seconds=PATIENCE))
    clock, looks, heard = count(step=PATIENCE / 30), 0, b""

    def shown(done, of) -> None:
        nonlocal looks
        looks += 1
        if looks == 60:
            store.set("long", "")

    def sleep(seconds) -> None:
        nonlocal heard
        last = heard
        while not hangs and looks < 60 and heard == last:
            heard = store.get("done/1")

    def hurry() -> None:
        """Time goes on each time that one looks, until it has been long."""
        if rank == 0:
            module.time = SimpleNamespace(monotonic=lambda: next(clock) if looks < 60 else 0, sleep=sleep)

    link.broadcast_request()
    if hangs == "before":
        hurry()
        if rank == 2:
            store.wait(["for ever"])
    link.broadcast_request()
    if rank == 0:
        store.wait(["done/0", "done/1"])
        hurry()
        return link.gather_completions(meanwhile=link.progress_monitor(64, shown))
    if rank == 2:
        link.report_progress(12, 64)
        while not store.check(["long"]):
            if not hangs:
                link.report_progress(12, 64)
    link.report_progress(1, 1)
    return link.gather_completions(rank)


def test_ranks_that_are_slow_are_waited_for() -> None:
    assert together(3, slow, None) == [[1, 2]] * 3


@pytest.mark.parametrize(
    ("hangs", "said"),
    [("before", "another rank did not come for the next prompts"), ("in its work", "rank 2 got no further")],
)
def test_a_rank_that_hangs_ends_the_wait(hangs, said) -> None:
    with pytest.raises(AssertionError, match=f"{said} for {PATIENCE / 60:g} minutes"):
        together(3, slow, hangs)


def test_buckets_are_full_and_never_fuller() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 4, 20, 1, 1)]
    weights.append(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
    assert [[one.numel() for one in some] for some in buckets(weights, 24)] == [[3, 2], [4], [20], [1, 1], [1]]


def stopped(rank, some, fifo):
    """A run that all ranks are told to stop after its first step; whether it said so."""
    from ebbtide.launch.run_rank import run_rank
    from ebbtide.report.report import Report

    step = Report.step

    def stepped(*args, **kwargs) -> None:
        step(*args, **kwargs)
        os.open(fifo, os.O_WRONLY)  # stays open: who comes later need not wait

    def stop() -> None:
        os.open(fifo, os.O_RDONLY)  # waits for one that writes
        os.kill(os.getpid(), signal.SIGTERM)

    Report.step = stepped

    next_port()
    threading.Thread(target=stop, daemon=True).start()
    try:
        run_rank(Job("test", some, None))
    except RunStopped:
        return True
    return False


@pytest.mark.slow
def test_a_run_that_is_stopped_is_saved_and_all_end(tmp_path) -> None:
    some = config(
        tmp_path / "run", {"gpus": 1, "rollout_gpus": 1}, {"train.steps": 100000, "checkpoint": {"every": None}}
    )
    os.mkfifo(tmp_path / "fifo")
    assert together(2, stopped, some, str(tmp_path / "fifo")) == [True, False]
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.step == (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")


@pytest.mark.slow
def test_the_command_starts_them_and_one_that_is_lost_ends_all(tmp_path) -> None:
    changes = {
        "parallel": {"gpus": 1, "rollout_gpus": 1},
        "train.steps": 100000,
        "report.samples_every": 0,
        "run.distributed_timeout_minutes": 1000.0,  # the one that is left does not wait for it
    }
    with command(tmp_path, changes) as process:
        lines = []
        while not lines or not lines[-1].startswith("step "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (lost,) = [child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
        os.kill(int(lost), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "1 rank more, only to generate, each with the whole model\n" in lines
    assert "rank 1 of 2 failed, and ended the run:\nit was killed by signal 9 (SIGKILL)" in err
    assert "Traceback" not in err
