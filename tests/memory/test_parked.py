"""Offloaded activations leave as a group, come back a group ahead, and are the same."""

import pytest
import torch

from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.mover import Mover


class Watched(Mover):
    """Remembers the bytes of each move."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.out: list[int] = []
        self.back: list[int] = []

    def move_out(self, pairs, after, *, kept_by_caller=False):
        self.out.append(sum(host.numel() for _, host in pairs))
        return super().move_out(pairs, after, kept_by_caller=kept_by_caller)

    def move_in(self, pairs, after, *, kept_by_caller=False):
        self.back.append(sum(host.numel() for _, host in pairs))
        return super().move_in(pairs, after, kept_by_caller=kept_by_caller)


@pytest.fixture
def mover() -> Watched:
    return Watched()


def parked(mover: Watched, groups: int = 5) -> tuple[ActivationOffloader, list]:
    """Group n holds two tensors of 100 * (n + 1) bytes, full of n and n + 100."""
    parking = ActivationOffloader(torch.zeros(2**16, dtype=torch.uint8), mover)
    views = []
    for number in range(groups):
        parking.enter(number)
        size = 100 * (number + 1)
        views.append(
            [parking.offload(torch.full((size,), value, dtype=torch.uint8)) for value in (number, number + 100)]
        )
    return parking, views


def test_a_group_leaves_at_once_when_the_next_begins(mover) -> None:
    parked(mover)
    assert mover.out == [200, 400, 600, 800]  # the last one is still wanted


def test_a_group_comes_back_before_it_is_asked_for(mover) -> None:
    parking, views = parked(mover)
    found = [
        (number, [parking.fetch(view) for view in reversed(views[number])], list(mover.back))
        for number in reversed(range(5))
    ]
    for number, (second, first), _ in found:
        assert first.tolist() == [number] * 100 * (number + 1)
        assert second.tolist() == [number + 100] * 100 * (number + 1)
    # 4 and 3 are still there; with 3, 2 is fetched; with 2, 1; with 1, 0.
    assert [moves for _, _, moves in found] == [[], [600], [600, 400], [600, 400, 200], [600, 400, 200]]


def test_what_changes_before_it_has_left_is_an_error(mover) -> None:
    parking = ActivationOffloader(torch.zeros(2**16, dtype=torch.uint8), mover)
    parking.enter(0)
    tensor = torch.ones(100)
    parking.offload(tensor.detach())
    tensor += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        parking.enter(1)


def test_asking_twice_is_an_error(mover) -> None:
    parking, views = parked(mover)
    parking.fetch(views[4][0])
    with pytest.raises(RuntimeError, match="fetched twice"):
        parking.fetch(views[4][0])
    parking.enter(0)
    with pytest.raises(RuntimeError, match="another forward had begun"):
        parking.fetch(views[4][1])
