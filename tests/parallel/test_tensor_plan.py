"""Which modules tensor parallelism cuts."""

from types import SimpleNamespace

from ebbtide.model.load import load_model
from ebbtide.parallel import tensor_parallel as tensor


def test_an_embedding_stays_whole_whatever_the_model_declares(tiny, monkeypatch) -> None:
    model = load_model(tiny()).model
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise", "layers.*.mlp.up_proj": "colwise"}
    cut = {}
    monkeypatch.setattr(tensor, "parallelize_module", lambda module, mesh, plan: cut.update(plan))
    tensor.parallelize(model, SimpleNamespace(size=lambda: 2))
    assert list(cut) == ["layers.*.mlp.up_proj"]
