"""States of sequences are read from their slots and written to them, whichever tensors these are."""

import os
from types import SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs them on a CPU
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]


@pytest.mark.parametrize("shapes", [((6, 4), (3, 5, 7)), ((4100,), (2, 1, 1))])
def test_states_are_copied_from_and_to_slots(shapes) -> None:
    from ebbtide.rollout.paged.state_kernels import AddressedSlots

    dtypes = {("conv", 0): torch.bfloat16, ("recurrent", 0): torch.float32}
    sizes = {
        name: torch.empty((1, *shape), dtype=dtype, device=DEVICE)
        for (name, dtype), shape in zip(dtypes.items(), shapes, strict=True)
    }
    slots = AddressedSlots([SimpleNamespace(sizes=sizes)] * 2, torch.device(DEVICE))
    for count in (9, 5):  # another session, whose slots lie elsewhere
        tensors = [
            {name: torch.randn((count, *one.shape[1:]), device=DEVICE).to(one.dtype) for name, one in sizes.items()}
            for _ in range(2)
        ]
        assert slots.attach(tensors) == count - 1
        rows = torch.tensor([3, 0, 4], dtype=torch.int32, device=DEVICE)
        found = slots.read(1, rows)
        for name, state in found.items():
            assert torch.equal(state, tensors[1][name][rows.long()])
        before = [{name: state.clone() for name, state in layer.items()} for layer in tensors]
        slots.write(0, rows[:2], {name: state[1:] for name, state in found.items()})
        for name in sizes:
            before[0][name][rows[:2].long()] = found[name][1:]
            assert torch.equal(tensors[0][name], before[0][name])
            assert torch.equal(tensors[1][name], before[1][name])
