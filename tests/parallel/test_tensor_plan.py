"""Which modules tensor parallelism cuts."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import next_port, together
from torch.distributed.device_mesh import init_device_mesh

from ebbtide.model.families import FAMILIES
from ebbtide.model.load import load_model
from ebbtide.parallel import tensor_parallel as tensor
from tidal import TIDAL, tidal_model

TOKENS = torch.arange(9)[None]


def test_an_embedding_stays_whole_whatever_the_model_declares(tiny, monkeypatch) -> None:
    model = load_model(tiny()).model
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise", "layers.*.mlp.up_proj": "colwise"}
    cut = {}
    monkeypatch.setattr(tensor, "parallelize_module", lambda module, mesh, plan: cut.update(plan))
    tensor.parallelize(model, SimpleNamespace(size=lambda: 2))
    assert list(cut) == ["layers.*.mlp.up_proj"]


def test_a_family_that_declares_nothing_is_cut_by_its_entry() -> None:
    with torch.no_grad():
        wanted = tidal_model().model(TOKENS).logits
    for logits, numbers in together(2, of_tidal):
        torch.testing.assert_close(torch.tensor(logits), wanted)
        # Of each block: half of the matrices and of their biases, and whole norms.
        heads = 32 * 16 + 16 + 2 * (32 * 8 + 8) + 16 * 32
        assert numbers == 13 * 32 + 2 * (heads + 3 * 32 * 24 + 2 * 8 + 2 * 32) + 32


def of_tidal(rank: int) -> tuple[list, int]:
    """The logits of a rank that has half of the heads, and the numbers that it holds."""
    next_port()
    FAMILIES["tidal"] = TIDAL
    dist.init_process_group("gloo")
    model = tidal_model().model
    tensor.parallelize(model, init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        logits = model(TOKENS).logits
    dist.destroy_process_group()
    held = [getattr(weight, "_local_tensor", weight).numel() for weight in model.parameters()]
    return logits.tolist(), sum(held)
