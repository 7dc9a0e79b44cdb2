"""States of sequences are read from their slots and written to them, whichever tensors these are."""

import os
from types import SimpleNamespace

import pytest
import torch

import state_families  # noqa: F401 (it knows the families)
from ebbtide.model.state_layers import StatePass, StateRows, TensorSlots, state_layers
from families import family_model

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2"])
@torch.no_grad()
def test_layers_compute_one_more_token_in_the_slots(name, dtype) -> None:
    from ebbtide.rollout.paged.state_kernels import AddressedSlots

    model = family_model(name, dtype).model.to(DEVICE)
    layers, count = state_layers(model).layers[:2], 6
    given = dict.fromkeys(layers[1]._empty)
    tensors = [{key: torch.randn_like(one) for key, one in layer.new_slots(count).items()} for layer in layers]
    addressed = AddressedSlots(layers, torch.device(DEVICE))
    read, write = (torch.tensor(slots, dtype=torch.int32, device=DEVICE) for slots in ([3, 0, 0, 5], [3, 1, 2, 4]))
    tokens = torch.randn((1, 4, layers[1].owner.hidden_size), device=DEVICE).to(dtype)
    rows = StateRows(torch.arange(4, device=DEVICE)[:, None], read, write)
    found = []
    for slots in (TensorSlots(tensors), addressed):
        own = [{key: one.clone() for key, one in states.items()} for states in tensors]
        if isinstance(slots, TensorSlots):
            slots = TensorSlots(own)
        else:
            addressed.attach(own)
            assert slots.in_place(1, read, write).keys() == own[1].keys()
        output = layers[1]._continue(tokens, dict(given), StatePass([rows], None, slots))
        found.append((output[0] if isinstance(output, tuple) else output, own))
    assert layers[1]._steps_in_slots
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[1][0], found[0][0], atol=tolerance, rtol=tolerance)
    for mine, wanted, before in zip(found[1][1], found[0][1], tensors, strict=True):
        for key, state in wanted.items():
            torch.testing.assert_close(mine[key], state, atol=tolerance, rtol=tolerance)
            assert torch.equal(mine[key][[0, 5]], before[key][[0, 5]])
