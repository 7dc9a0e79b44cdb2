"""How copies are cut into slices; tests/gpu/test_moves.py has the copies themselves."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.memory import mover


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20))
def test_slices_are_all_bytes_once_and_in_order(sizes, most) -> None:
    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    whole, mover.SLICE = mover.SLICE, most
    try:
        groups = list(mover._slices(zip(targets, sources, strict=True)))
    finally:
        mover.SLICE = whole
    for group in groups:
        assert 0 < sum(source.numel() for _, source in group) <= most
        for target, source in group:
            target.copy_(source)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
    assert torch.equal(
        torch.cat([source for group in groups for _, source in group] or [torch.empty(0)]).byte(),
        torch.cat([*sources, torch.empty(0)]).byte(),
    )
    # Whatever fits together is together.
    assert all(
        sum(source.numel() for _, source in group) + after[0][1].numel() > most for group, after in pairwise(groups)
    )
