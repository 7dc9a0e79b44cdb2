"""The engine on vLLM, for real, on whatever vLLM there is: on a CPU its `sleep` does nothing, so that freed memory
is not seen here."""

import json
import math
import random

import numpy
import pytest
import torch

from completions import stopped_by
from conftest import TINY, family, merged
from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.report.report import Report
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.worker import seed_everything

pytest.importorskip("vllm")

from ebbtide.rollout.vllm_engine import VllmEngine

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [4, 4]]
SETTINGS = {
    "model.scratch.head_dim": 32,  # vLLM has no smaller heads on a CPU
    "rollout.engine": "vllm",
    "rollout.vllm": {"bucket_mib": 1, "args": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}},
}


def quiet(done: int, of: int) -> None:
    assert 0 <= done <= of


def made(changes):
    config = GrpoConfig.model_validate(merged(TINY, {**SETTINGS, **changes}))
    loaded = load_initial(config, torch.device("cpu"))
    return loaded, VllmEngine(loaded, config)


def stirred(loaded, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)


def greedy(loaded, engine) -> None:
    """The engine's greedy tokens and log-probs are those of the policy as it is now."""
    groups = engine.generate([Request(prompt, [0]) for prompt in PROMPTS], SamplingParams(7, temperature=0), quiet)
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        wanted = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert completion.tokens == wanted
        close(completion.logprobs, forward_logprobs(loaded.model, prompt, completion.tokens))
        assert completion.plain_logprobs == completion.logprobs


@torch.no_grad()
def forward_logprobs(model, prompt, tokens, temperature=1.0):
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def close(found, wanted) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=["qwen3", "llama", "adapters"])
def of_family(request):
    loaded, engine = made({"model.lora": {"rank": 3}} if request.param == "adapters" else family(request.param))
    stirred(loaded, 2)
    return loaded, engine


@pytest.fixture(scope="module")
def tempered():
    loaded, engine = made({"rollout.temperature": 0.8})
    stirred(loaded, 2)
    return loaded, engine


def test_greedy_follows_the_policys_weights(of_family) -> None:
    loaded, engine = of_family
    greedy(loaded, engine)
    before = engine.generate([Request(prompt, [0]) for prompt in PROMPTS], SamplingParams(7, temperature=0), quiet)
    trained = [weight for weight in loaded.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    loaded.model(torch.tensor([PROMPTS[2]]), labels=torch.tensor([PROMPTS[2]])).loss.backward()
    optimizer.step()
    after = engine.generate([Request(prompt, [0]) for prompt in PROMPTS], SamplingParams(7, temperature=0), quiet)
    assert [group[0].tokens for group in after] != [group[0].tokens for group in before]
    greedy(loaded, engine)


def test_logprobs_at_one_are_over_all_tokens_also_where_the_choice_is_cut(of_family) -> None:
    loaded, engine = of_family
    for sampling in (
        SamplingParams(6),
        SamplingParams(6, top_k=4),
        SamplingParams(6, top_p=0.7),
        SamplingParams(6, min_p=0.5),
    ):
        (group,) = engine.generate([Request([3, 4, 5], [1, 2, 3])], sampling, quiet)
        for completion in group:
            close(completion.logprobs, forward_logprobs(loaded.model, [3, 4, 5], completion.tokens))
            assert completion.plain_logprobs == completion.logprobs


def test_a_cut_choice_keeps_to_the_likely_tokens(of_family) -> None:
    _, engine = of_family
    (only,) = engine.generate([Request([3, 4], [0])], SamplingParams(6, temperature=0), quiet)
    for sampling in (SamplingParams(6, top_k=1), SamplingParams(6, top_p=1e-6), SamplingParams(6, min_p=1.0)):
        (group,) = engine.generate([Request([3, 4], [1, 2])], sampling, quiet)
        assert [completion.tokens for completion in group] == [only[0].tokens] * 2


def test_logprobs_at_a_temperature_and_at_one(tempered) -> None:
    loaded, engine = tempered
    groups = engine.generate(
        [Request(prompt, [1, 2, 3]) for prompt in PROMPTS], SamplingParams(6, temperature=0.8), quiet
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            close(completion.logprobs, forward_logprobs(loaded.model, prompt, completion.tokens, 0.8))
            close(completion.plain_logprobs, forward_logprobs(loaded.model, prompt, completion.tokens))
    greedy(loaded, engine)


def test_logprobs_that_vllm_cannot_give_are_not_made_up(of_family, tempered) -> None:
    with pytest.raises(ValueError, match="other log-probs"):
        of_family[1].generate([Request([3], [1])], SamplingParams(2, temperature=0.8), quiet)
    with pytest.raises(ValueError, match="other log-probs"):
        tempered[1].generate([Request([3], [1])], SamplingParams(2, temperature=0.8, top_p=0.9), quiet)


def test_a_sample_is_that_of_its_seed_whatever_its_neighbours(of_family) -> None:
    _, engine = of_family
    crowd = [Request(prompt, [10 * i, 10 * i + 1, 2**63 - 1 - i]) for i, prompt in enumerate(PROMPTS)]
    together = engine.generate(crowd, SamplingParams(8), quiet)
    alone = [engine.generate([request], SamplingParams(8), quiet)[0] for request in crowd]
    assert [[c.tokens for c in group] for group in together] == [[c.tokens for c in group] for group in alone]
    assert together[2][0].tokens != together[2][1].tokens


def test_end_tokens_lengths_and_going_on_past_them(of_family) -> None:
    loaded, engine = of_family
    requests, end = [Request([3, 4], list(range(40)))], loaded.tokenizer.eos_token_id
    (group,) = engine.generate(requests, SamplingParams(8), quiet)
    assert {completion.finish for completion in group} == {"stop", "length"}
    for completion in group:
        assert len(completion.tokens) == len(completion.logprobs) <= 8
        assert (completion.tokens[-1] == end) == (completion.finish == "stop")
        assert end not in completion.tokens[:-1]
        assert (len(completion.tokens) == 8) or completion.finish == "stop"
    (free,) = engine.generate(requests, SamplingParams(8, ignore_eos=True), quiet)
    assert all(len(completion.tokens) == 8 and completion.finish == "length" for completion in free)
    assert any(end in completion.tokens for completion in free)


def test_stop_texts_end_a_completion_and_are_cut_from_its_text(of_family) -> None:
    loaded, engine = of_family
    requests = [Request([3, 4], list(range(40)))]
    (free,) = engine.generate(requests, SamplingParams(8), quiet)
    (held,) = engine.generate(requests, SamplingParams(8, stop=("7", "12")), quiet)
    assert 0 < stopped_by(("7", "12"), free, held, loaded.tokenizer) < 40


def test_progress_counts_samples(of_family) -> None:
    _, engine = of_family
    seen: list[tuple[int, int]] = []
    engine.generate(
        [Request([3], [1, 2]), Request([4], [3])], SamplingParams(4), lambda done, of: seen.append((done, of))
    )
    assert seen[-1] == (3, 3)
    assert seen == sorted(seen)


def test_weights_that_diverged_are_an_error_with_advice() -> None:
    loaded, engine = made({})
    next(loaded.model.parameters()).data.fill_(math.nan)
    with pytest.raises(UserError, match=r"logits are not finite.*`optimizer.lr`"):
        engine.generate([Request([3, 4], [1])], SamplingParams(4), quiet)


@pytest.mark.parametrize("level", [0, 1])
def test_no_sleep_level_keeps_what_old_weights_computed(level) -> None:
    args = {**SETTINGS["rollout.vllm"]["args"], "block_size": 32}
    loaded, engine = made({"rollout.max_prompt_tokens": 48, "rollout.vllm": {"sleep_level": level, "args": args}})
    prompt = [3 + place % 9 for place in range(40)]  # longer than a block: its start is cached
    for seed in (2, 3):
        stirred(loaded, seed)
        ((completion,),) = engine.generate([Request(prompt, [0])], SamplingParams(6, temperature=0), quiet)
        close(completion.logprobs, forward_logprobs(loaded.model, prompt, completion.tokens))


def test_the_process_keeps_its_random_numbers() -> None:
    def drawn() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]

    seed_everything(7, deterministic=False)
    wanted = drawn()
    seed_everything(7, deterministic=False)
    made({})
    assert drawn() == wanted


def test_experts_on_a_cpu_are_refused() -> None:
    with pytest.raises(UserError, match="experts on a CPU"):
        made(family("qwen3_moe"))


def test_arguments_that_are_ours_or_unknown_are_refused() -> None:
    with pytest.raises(UserError, match=r"`rollout.vllm.args` names dtype"):
        made({"rollout.vllm": {"args": {"dtype": "float16"}}})
    with pytest.raises(UserError, match=r"vLLM refuses.*no_such_argument"):
        made({"rollout.vllm": {"args": {"no_such_argument": 1}}})


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_whole_run_trains_on_what_vllm_sampled(tmp_path, temperature) -> None:
    changes = {"rollout.temperature": temperature, "run.folder": str(tmp_path), "train.steps": 3, "optimizer.lr": 0.02}
    config = GrpoConfig.model_validate(merged(TINY, {**SETTINGS, **changes, "evaluate": {"every": 2, "problems": 4}}))
    with Report(config, "test") as report:
        train(config, report)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(step["mismatch_max"] < 1e-4 for step in steps[1:])
