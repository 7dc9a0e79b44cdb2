"""Generation with the policy's own weights: tokens a second of the paged engine, beside transformers' `generate` and
`generate_batch`.

    python benchmarks/rollout.py [start] [grpo] [lengths] [experts] [generate] [generate_batch]

start: from a loaded model to the first token, graphs captured, in a process that has compiled nothing. grpo: 16 and
64 prompts x 8 samples of 126 + 256 tokens with log-probs, on the Qwen3-1.7B shape, with prompts shared and not, and
how far the log-probs of the engine, of the trainer and of the same weights in fp32 lie apart. lengths: 256 prompts
of 100 to 1,024 tokens with as many new ones (nano-vllm's benchmark), on the Qwen3-0.6B and 1.7B shapes. experts: 16
prompts x 8 samples of a mixture of experts, captured and not. generate, generate_batch: transformers on the first of
the GRPO workloads. Weights are random and end tokens ignored, so that the work is the same for all. The bound of a
workload is the time to read weights and keys and values at 4.8 TB/s and to multiply the prompts at 989 TFLOP/s, and
nothing else.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Row, beginning, kept, save

from ebbtide.config import load
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.policy.attention import use_attention
from ebbtide.policy.datum import Datum, trajectory
from ebbtide.policy.policy import Policy
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.attention import model_cache_costs
from ebbtide.rollout.paged.engine import PagedEngine

CONFIG = str(Path(__file__).parent / "configs" / "qwen3-1.7b.yaml")
EXPERTS = ["architecture=qwen3_moe", "layers=12", "experts=32", "experts_per_token=4", "mlp=768"]
SMALL = ["model.scratch.hidden=1024", "model.scratch.mlp=3072", "model.scratch.tied=true"]
BANDWIDTH, COMPUTE = 4.8e12, 989e12

Work = Sequence[tuple[Request, SamplingParams]]


def bound(loaded: LoadedModel, work: Work) -> float:
    """Seconds that the workload takes where nothing but memory and matrix units limit it."""
    embedding = loaded.model.get_input_embeddings().weight
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    tied = loaded.model.get_output_embeddings().weight is embedding
    used = weights - (0 if tied else embedding.numel())
    each = model_cache_costs(loaded.model.config).bytes_per_token(2)
    steps = max(sampling.max_new_tokens for _, sampling in work)
    own = sum(len(request.seeds) * sampling.max_new_tokens**2 // 2 for request, sampling in work)
    prompts = sum(len(request.prompt) * sampling.max_new_tokens for request, sampling in work)  # read once for a group
    read = sum(len(request.prompt) for request, _ in work)
    return (steps * 2 * used + each * (own + prompts)) / BANDWIDTH + 2 * used * read / COMPUTE


def timed(engine: PagedEngine, work: Work) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    with engine.session(
        [(len(request.prompt), len(request.seeds)) for request, _ in work], max(s.max_new_tokens for _, s in work)
    ) as session:
        told = [session.add(request, sampling) for request, sampling in work]
        while not session.finished:
            session.step()
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    assert all(len(one.tokens) == one.sampling.max_new_tokens for group in told for one in group)
    return taken


def measured(label: str, loaded: LoadedModel, engine: PagedEngine, work: Work, repeats: int = 3) -> list[Row]:
    tokens = sum(len(request.seeds) * sampling.max_new_tokens for request, sampling in work)
    timed(engine, work)
    taken = statistics.median(timed(engine, work) for _ in range(repeats))
    return [
        Row(label, "tokens a second", tokens / taken, "tok/s"),
        Row(label, "of the bound", 100 * bound(loaded, work) / taken, "%"),
        Row(label, "seconds", taken, "s"),
    ]


def grpo_work(prompts: int, sampling: SamplingParams) -> list[tuple[Request, SamplingParams]]:
    chance = random.Random(0)
    return [
        (Request([chance.randrange(5, 150_000) for _ in range(126)], [8 * n + i for i in range(8)]), sampling)
        for n in range(prompts)
    ]


def start() -> list[Row]:
    loaded = load_model(load(CONFIG))
    work = grpo_work(16, SamplingParams(1, ignore_eos=True))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine = PagedEngine(loaded, 128)
    timed(engine, work)
    first = time.perf_counter() - begun
    timed(engine, grpo_work(16, SamplingParams(2, ignore_eos=True)))
    return [
        Row("start", "until 128 samples have a token", first, "s"),
        Row("start", "and a graph decoded the second", time.perf_counter() - begun, "s"),
    ]


def grpo() -> list[Row]:
    config = load(CONFIG)
    loaded = load_model(config)
    sampling = SamplingParams(256, ignore_eos=True)
    rows = []
    for prompts in (16, 64):
        work = grpo_work(prompts, sampling)
        for label, shared in (("prompts shared", True), ("prompts not shared", False)):
            engine = PagedEngine(loaded, 8 * prompts, share_prompts=shared)
            rows += measured(f"GRPO {prompts} x 8, {label}", loaded, engine, work)
    requests = [request for request, _ in grpo_work(16, sampling)]
    groups = PagedEngine(loaded, 128).generate(requests, sampling, lambda *_: None)
    trajectories = [
        trajectory(request.prompt, done.tokens, done.logprobs)
        for request, group in zip(requests, groups, strict=True)
        for done in group
    ]
    Policy(loaded, config).compute_logprobs("old_logprobs", trajectories, lambda *_: None)
    sampled = torch.cat([torch.tensor(one.values["rollout_logprobs"]) for one in trajectories])
    trained = torch.cat([torch.as_tensor(one.values["old_logprobs"]).cpu() for one in trajectories])
    exact = exact_logprobs(loaded, trajectories)
    for label, one, other in (
        ("engine, trainer", sampled, trained),
        ("engine, fp32", sampled, exact),
        ("trainer, fp32", trained, exact),
    ):
        difference = (one - other).abs()
        rows += [
            Row(f"GRPO 16 x 8, log-probs: {label}", "mean difference", difference.mean().item(), "nats"),
            Row(f"GRPO 16 x 8, log-probs: {label}", "largest difference", difference.max().item(), "nats"),
        ]
    return rows


@torch.no_grad()
def exact_logprobs(loaded: LoadedModel, trajectories: Sequence[Datum]) -> torch.Tensor:
    """What the same weights give where nothing is rounded to 16 bits."""
    model: Any = copy.deepcopy(loaded.model).float()
    found = []
    for one in trajectories:
        ids = torch.tensor([one.tokens], device="cuda")
        rows = model(ids, use_cache=False).logits[0, one.targets[0] - 1 : -1].log_softmax(-1)
        found.append(rows.gather(-1, ids[0, one.targets[0] :, None])[:, 0].cpu())
    return torch.cat(found)


def lengths_work() -> list[tuple[Request, SamplingParams]]:
    chance = random.Random(0)
    prompts = [[chance.randint(5, 10_000) for _ in range(chance.randint(100, 1024))] for _ in range(256)]
    return [
        (Request(prompt, [n]), SamplingParams(chance.randint(100, 1024), 0.6, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]


def lengths() -> list[Row]:
    rows = []
    for label, options in (("Qwen3-0.6B", SMALL), ("Qwen3-1.7B", [])):
        loaded = load_model(load(CONFIG, options))
        rows += measured(f"lengths of 100 to 1,024, {label}", loaded, PagedEngine(loaded, 256), lengths_work())
        del loaded
    return rows


def experts() -> list[Row]:
    loaded = load_model(load(CONFIG, [f"model.scratch.{option}" for option in EXPERTS]))
    rows = []
    for label, captures in (("captured", True), ("not captured", False)):
        engine = PagedEngine(loaded, 128)
        engine._runner._captures = captures and engine._runner._captures  # type: ignore[attr-defined]
        rows += measured(
            f"experts, 16 x 8, {label}", loaded, engine, grpo_work(16, SamplingParams(256, ignore_eos=True)), repeats=2
        )
    return rows


def peer(name: str) -> list[Row]:
    from transformers import GenerationConfig

    loaded = load_model(load(CONFIG))
    model: Any = loaded.model
    prompts = [request.prompt for request, _ in grpo_work(16, SamplingParams(256)) for _ in request.seeds]
    ids = torch.tensor(prompts, device="cuda")

    def run(new: int) -> None:
        settings = GenerationConfig(do_sample=True, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
        if name == "generate":
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        else:
            model.generate_batch(prompts, generation_config=settings, progress_bar=False)
        torch.cuda.synchronize()

    with use_attention(loaded.model, loaded.generate_attention), torch.no_grad():
        run(8)  # warms up
        begun = time.perf_counter()
        run(256)
        taken = time.perf_counter() - begun
    return [Row(f"transformers {name}, GRPO 16 x 8", "tokens a second", 128 * 256 / taken, "tok/s")]


STAGES: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "start": ("start", start),
    "grpo": ("GRPO", grpo),
    "lengths": ("lengths", lengths),
    "experts": ("experts", experts),
    "generate": ("transformers generate,", partial(peer, "generate")),
    "generate_batch": ("transformers generate_batch", partial(peer, "generate_batch")),
}


def main() -> None:
    for name in sys.argv[1:] or list(STAGES):
        begins, stage = STAGES[name]
        rows = stage()
        save("rollout", [*kept("rollout", beginning(begins)), *rows])


if __name__ == "__main__":
    main()
