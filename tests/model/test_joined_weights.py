"""Weights that are moved into one storage keep their numbers, and follow each other where they did."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ebbtide.model.joined_weights import ALIGNED, join, joined, pack
from ebbtide.system.torch_internals import storage_id


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def parameters() -> list[nn.Parameter]:
    """A norm, three matrices that are multiplied with the same input, codes in 4 and in 8 bits, and scales."""
    codes = torch.randint(256, (6, 5), dtype=torch.uint8)
    return [
        frozen(torch.randn(3)),
        *(frozen(torch.randn(rows, 8).bfloat16()) for rows in (16, 4, 4)),
        *(frozen(codes.clone().view(kind)) for kind in (torch.uint8, torch.float8_e4m3fn)),
        frozen(torch.randn(6, 1).bfloat16()),
    ]


def test_all_have_one_storage_and_the_same_bits() -> None:
    given = parameters()
    join(given[1:4])
    before = [one.detach().clone() for one in given]
    pack(given)
    assert len({storage_id(one) for one in given}) == 1
    for one, wanted in zip(given, before, strict=True):
        assert one.dtype == wanted.dtype
        assert one.shape == wanted.shape
        assert torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))
    firsts = [one.data_ptr() for one in given if one is not given[2] and one is not given[3]]
    assert all(place % ALIGNED == 0 for place in firsts)
    assert given[1].data_ptr() == min(firsts)  # the largest
    whole = joined(given[1:4])
    assert whole is not None
    assert torch.equal(whole, torch.cat(before[1:4]))


def test_parameters_that_do_not_follow_each_other_are_not_joined() -> None:
    given = parameters()
    pack(given)
    assert joined(given[2:0:-1]) is None


def test_parts_of_a_file_are_memory_that_can_be_resized(tmp_path) -> None:
    save_file({"one": torch.randn(64, 8), "other": torch.randn(3, 8)}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    given = [frozen(one) for one in loaded.values()]
    pack(given)
    assert given[0].untyped_storage().resizable()
    assert all(torch.equal(one, wanted) for one, wanted in zip(given, loaded.values(), strict=True))


def test_what_is_packed_again_stays_as_it_is() -> None:
    given = parameters()
    pack(given)
    before = [one.data_ptr() - given[1].data_ptr() for one in given]
    pack(given)
    assert [one.data_ptr() - given[1].data_ptr() for one in given] == before
