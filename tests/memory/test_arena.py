"""The arena: blocks never overlap, gaps meet again, nothing is wasted, and too little memory is said before any is
taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.memory.arena import ALIGNMENT, Arena, check_host_budget
from ebbtide.memory.buckets import allocate_buckets
from ebbtide.memory.host import free_host_bytes
from ebbtide.system.units import GIB


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40000)), max_size=40))
def test_any_taking_and_giving_back(actions) -> None:
    arena = Arena(pin=False, slab=64 * 1024)
    arena.reserve([64 * 1024])
    held = []
    for give_back, size in actions:
        if give_back and held:
            block, fill = held.pop(size % len(held))
            assert (block.data == fill).all()
            arena.free(block)
        else:
            block, fill = arena.allocate(size), size % 251
            assert block.data.numel() == block.size == size
            block.data.fill_(fill)
            held.append((block, fill))
    assert arena.used_bytes == sum(rounded(block.size) for block, _ in held)
    for block, fill in held:
        assert (block.data == fill).all()  # nobody wrote over it
        arena.free(block)
    assert arena.used_bytes == 0
    assert all(gaps == [(0, slab.numel())] for gaps, slab in zip(arena._gaps, arena._slabs, strict=True))


@given(st.lists(st.integers(1, 100000), min_size=1, max_size=20))
def test_what_is_reserved_is_just_enough(sizes) -> None:
    arena = Arena(pin=False, slab=100 * 1024)
    arena.reserve(sizes)
    wanted = sum(map(rounded, sizes))
    assert arena.bytes == wanted
    for size in sizes:
        arena.allocate(size)
    assert arena.bytes == arena.used_bytes == wanted  # no power-of-two waste, no slab beside


def test_no_bytes_take_none() -> None:
    arena = Arena(pin=False)
    arena.free(arena.allocate(0))
    assert arena.bytes == 0


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    needs = {"moments": 3 * GIB, "master": 2 * GIB, "reference": 0}
    with pytest.raises(UserError) as caught:
        check_host_budget(needs, budget_gib=4.0)
    for needle in ("5.00 GiB", "moments 3.00", "master 2.00", "`memory.host_budget_gib` = 4"):
        assert needle in str(caught.value)
    assert check_host_budget(needs, budget_gib=5.0) == 5 * GIB
    with pytest.raises(UserError, match="80% of the free host memory"):
        check_host_budget({"moments": free_host_bytes()}, None)
    with pytest.raises(UserError, match=r"more than the .* GiB that are free") as caught:
        check_host_budget({"moments": 2 * free_host_bytes()}, budget_gib=10**6)
    assert "host_budget_gib" not in str(caught.value)  # it would not help


@given(st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=12), st.sampled_from([torch.float32, torch.bfloat16]))
def test_buckets_hold_every_tensor_once(shapes, dtype) -> None:
    flats, views = allocate_buckets([torch.Size(shape) for shape in shapes], dtype, torch.device("cpu"), limit=2048)
    assert [list(view.shape) for view in views] == shapes
    assert all(view.data_ptr() % 64 == flats[0].data_ptr() % 64 for view in views) or not views
    for number, view in enumerate(views):
        view.fill_(number)
    assert all((view == number).all() for number, view in enumerate(views))  # they share no element
    starts = {flat.data_ptr(): flat for flat in flats}
    for view in views:
        assert any(start <= view.data_ptr() < start + flat.nbytes for start, flat in starts.items())
