"""The paged engine on a GPU: graphs, kernels and fused blocks sample what transformers' `generate` samples."""

from itertools import chain

import pytest
import torch

from conftest import FAMILIES, family, windowed_model
from ebbtide.model.load import load_model
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.verify import build_verified_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ASKED = [
    Request([3, 4, 5], [1, 2, 3, 4, 5]),
    Request([6], [6]),
    Request([7, 8, 9, 10, 11, 3, 4], [7, 8]),
    Request([4, 4], [9]),
]


def loaded_model(tiny, dtype, changes):
    loaded = load_model(tiny({"device": "cuda", "model.dtype": dtype, **changes}))
    torch.manual_seed(2)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return loaded


def tokens_of(groups):
    return [one.tokens for group in groups for one in group]


def quiet(done: int, of: int) -> None:
    assert 0 <= done <= of


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(20, 0.0, ignore_eos=True),
        SamplingParams(20, 0.9, ignore_eos=True),
        SamplingParams(20, 1.0, top_p=0.8, top_k=9),
    ],
)
def test_the_tokens_are_those_of_transformers(tiny, name, sampling) -> None:
    loaded = loaded_model(tiny, "float32", family(name))
    wanted = HuggingFaceEngine(loaded, 100).generate(ASKED, sampling, quiet)
    for options in ({}, {"block": 4, "chunk": 3, "blocks": 14}, {"share_prompts": False}):
        engine = PagedEngine(loaded, 6, **options)
        for _ in range(2):  # the second time from captured graphs
            found = engine.generate(ASKED, sampling, quiet)
            assert tokens_of(found) == tokens_of(wanted)
            for mine, theirs in zip(chain(*found), chain(*wanted), strict=True):
                torch.testing.assert_close(
                    torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-3, rtol=1e-3
                )
        if sampling.ignore_eos:
            assert (engine.preempted > 0) == ("blocks" in options)
    assert engine._runner.is_fused


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_was_tried_is_as_new(tiny, name, dtype) -> None:
    loaded = loaded_model(tiny, dtype, family(name))
    tried = build_verified_engine(loaded, 16, longest=(8, 24), samples=5)
    assert not tried._runner._graphs
    new = PagedEngine(loaded, 16, longest=(8, 24))
    sampling = SamplingParams(20, 0.9, ignore_eos=True)
    found, wanted = (tokens_of(engine.generate(ASKED, sampling, quiet)) for engine in (tried, new))
    assert found == wanted
    assert tried._runner._graphs.keys() == new._runner._graphs.keys()


def test_a_window_is_kept_to(tiny) -> None:
    loaded = windowed_model("cuda")
    sampling = SamplingParams(30, 0.0, ignore_eos=True)
    wanted = HuggingFaceEngine(loaded, 100).generate(ASKED, sampling, quiet)
    assert tokens_of(PagedEngine(loaded, 16).generate(ASKED, sampling, quiet)) == tokens_of(wanted)


def test_top_p_in_deterministic_mode(tiny) -> None:
    loaded = loaded_model(tiny, "float32", {})
    torch.use_deterministic_algorithms(True)
    try:
        PagedEngine(loaded, 16).generate(ASKED, SamplingParams(5, top_p=0.5, top_k=5, min_p=0.01), quiet)
    finally:
        torch.use_deterministic_algorithms(False)


def test_logprobs_in_16_bits_are_those_of_a_full_forward(tiny) -> None:
    loaded = loaded_model(tiny, "bfloat16", {"model.scratch.hidden": 128, "model.scratch.layers": 4})
    groups = PagedEngine(loaded, 64).generate(
        [Request([3, 4, 5, 6], list(range(32)))], SamplingParams(30, 1.0, ignore_eos=True), quiet
    )
    differences = []
    for completion in groups[0]:
        with torch.no_grad():
            logits = (
                loaded.model(torch.tensor([[3, 4, 5, 6, *completion.tokens]], device="cuda"), use_cache=False)
                .logits[0]
                .float()
            )
        rows = logits.log_softmax(-1)[3:-1].cpu()
        differences.append(
            rows.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0] - torch.tensor(completion.logprobs)
        )
    assert torch.cat(differences).abs().mean() < 0.02


def test_experts_in_16_bits_are_captured_and_sample_what_they_do_without(tiny) -> None:
    loaded = loaded_model(tiny, "bfloat16", {**family("qwen3_moe"), "model.scratch.hidden": 128})
    sampling, found = SamplingParams(20, 1.0, ignore_eos=True), []
    for captured in (True, False):
        engine = PagedEngine(loaded, 16)
        assert engine._runner._captures == (torch.cuda.get_device_capability()[0] in (9, 10))
        engine._runner._captures = captured and engine._runner._captures
        found.append([(one.tokens, one.logprobs) for group in engine.generate(ASKED, sampling, quiet) for one in group])
    assert found[0] == found[1]


def test_graphs_survive_another_cache_and_notice_weights_that_moved(tiny) -> None:
    loaded = loaded_model(tiny, "float32", {})
    engine = PagedEngine(loaded, 16)
    before = tokens_of(engine.generate(ASKED, SamplingParams(12), quiet))
    graphs = dict(engine._runner._graphs)
    hole = torch.empty(10_000_000, device="cuda")  # the next cache lies elsewhere
    assert tokens_of(engine.generate(ASKED, SamplingParams(12), quiet)) == before
    assert engine._runner._graphs == graphs
    del hole
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.clone()
    assert tokens_of(engine.generate(ASKED, SamplingParams(12), quiet)) == before
    assert engine._runner._graphs != graphs
    for parameter in loaded.model.parameters():
        parameter.data.mul_(-1)  # in place: no new graph, another model
    assert tokens_of(engine.generate(ASKED, SamplingParams(12), quiet)) != before


@pytest.mark.parametrize("keep", [True, False])
def test_a_session_that_rests_goes_on_where_it_was(tiny, keep) -> None:
    loaded = loaded_model(tiny, "float32", {})
    engine, sampling = PagedEngine(loaded, 16, block=4), SamplingParams(24, 0.9, ignore_eos=True)
    wanted = engine.generate(ASKED, sampling, quiet)
    lasting = engine.persistent_session(len(ASKED), 8, 5, 24, keep=keep)
    told = [lasting.session.add(request, sampling) for request in ASKED]
    while not lasting.session.finished:
        with lasting.resumed() as session:
            for _ in range(5):
                session.step()
        hole = torch.full((1_000_000,), torch.nan, device="cuda")  # what is not kept is overwritten
        assert bool(lasting.kept.get("kv_cache")) == (keep and not lasting.session.finished)
        del hole
    assert [[one.tokens for one in group] for group in told] == [[one.tokens for one in group] for group in wanted]
