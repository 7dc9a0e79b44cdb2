"""Exact mode on a GPU: the log-probs that the sampler records are the trainer's, to the bit."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import FAMILIES, TINY, family
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import LoraConfig
from ebbtide.config.root import Config
from ebbtide.model.attention_kind import AttentionKind
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.model.quantized_layers import SCALE
from ebbtide.policy.datum import Datum
from ebbtide.policy.exact import make_exact, why_not_exact
from ebbtide.policy.packed_attention import PackedAttention
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.system.gpu import HOPPER, generation
from ebbtide.system.torch_internals import without_split_k
from example_runs import config_of, run, same
from families import SHAPE, TOKENIZER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _without_split_k():
    if generation(torch.device("cuda")) != HOPPER:
        pytest.skip("exact mode is for GPUs of the Hopper generation")
    with without_split_k():
        yield


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_logprobs_are_the_trainers(tiny, name, seed) -> None:
    chance = random.Random(f"{name} {seed}")
    kv_heads, channels = chance.choice([1, 2, 3, 8]), chance.choice([64, 128, 256])
    heads = kv_heads * chance.choice([1, 2, 7])
    hidden = 64 * heads * chance.randint(1, max(1, 20 // heads))  # transformers wants a multiple of the heads
    longest = (100, 600, 1500, 3600)[seed]
    config = tiny(
        {
            **family(name),
            "device": "cuda",
            "model.dtype": "bfloat16",
            "model.scratch.hidden": hidden,
            "model.scratch.heads": heads,
            "model.scratch.kv_heads": kv_heads,
            "model.scratch.head_dim": channels,
            "model.scratch.mlp": 64 * chance.randint(1, 60),
            "model.scratch.layers": 2,
            "model.scratch.context": 4096,
            "rollout.temperature": chance.choice([1.0, 0.7]),
            "rollout.max_prompt_tokens": longest,
            "rollout.max_new_tokens": 400,
            "train.microbatch_tokens": 4096,
            "train.head_chunk_tokens": chance.choice([5, 64, 2048]),
        }
    )
    check(load_model(config), config, chance)


MIXED = ["full_attention", "sliding_attention"]
OTHERS = {
    "mistral": {"sliding_window": 40},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"residual_multiplier": 0.22, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    "ministral": {"sliding_window": 70, "layer_types": MIXED},
    "seed_oss": {},
    "gemma3_text": {"sliding_window": 40, "layer_types": MIXED},
    "olmo2": {},
    "olmo3": {"sliding_window": 40, "layer_types": MIXED},
    "exaone4": {"sliding_window": 40, "layer_types": MIXED},
    "phi3": {"sliding_window": 40},
    "phi3 with heads of 96 channels, of which 72 rotate": {
        "head_dim": 96,
        "hidden_size": 384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "glm": {},
    "glm4": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_families_that_are_not_made_from_nothing(tiny, name) -> None:
    """Windows that cut, layers without rotary embeddings, factors, more norms."""
    longest = 300
    config = tiny(
        {
            "device": "cuda",
            "model.dtype": "bfloat16",
            "rollout.max_prompt_tokens": longest,
            "rollout.max_new_tokens": 400,
            "model.scratch.context": 1024,
            "train.microbatch_tokens": 4096,
            "train.head_chunk_tokens": 64,
        }
    )
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 64}
    made = AutoConfig.for_model(name.split()[0], **{**SHAPE, **sizes, "max_position_embeddings": 1024, **OTHERS[name]})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval().cuda()
    check(LoadedModel(model, TOKENIZER, "sdpa"), config, random.Random(name))


ADAPTERS = {
    "all of rank 32": LoraConfig(),
    "all of rank 8": LoraConfig(rank=8),
    "all of rank 1": LoraConfig(rank=1, alpha=2),
    "some of rank 20": LoraConfig(rank=20, targets=["q_proj", "v_proj", "up_proj"]),
    "some of rank 256": LoraConfig(rank=256, exclude=["q_proj", "k_proj", "v_proj"]),
}


@pytest.mark.parametrize(
    ("name", "which"),
    [*((name, which) for name in ("qwen3", "qwen2") for which in ADAPTERS), ("qwen3_moe", "all of rank 8")],
)
def test_with_adapters(tiny, name, which) -> None:
    config = with_odd_sizes(tiny, {**family(name), "model.lora": ADAPTERS[which].model_dump()})
    loaded = load_model(config)
    add_adapters(loaded.model, ADAPTERS[which], seed=0)
    check(loaded, config, random.Random(which))  # which also gives B other values than 0
    assert all(float(layer.lora_B.detach().abs().max()) > 0 for layer in adapted_layers(loaded.model).values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("base", "embeddings"), [("float8", False), ("int4", False), ("int4", True)])
def test_with_a_quantized_base(tiny, base, embeddings, tied) -> None:
    quantized = {"model.base": base, "model.base_embeddings": embeddings, "model.scratch.tied": tied}
    config = with_odd_sizes(tiny, {"model.lora": {"rank": 20}, **quantized})
    check(load_initial(config, torch.device("cuda")), config, random.Random(base))


def test_with_a_quantized_base_and_no_adapters_where_it_has_two_kinds_of_codes(tiny) -> None:
    """Then the kernel after those products is started early."""
    lora = {"rank": 20, "exclude": ["q_proj", "k_proj", "v_proj"]}
    config = with_odd_sizes(tiny, {"model.lora": lora, "model.base": "int4"})
    check(load_initial(config, torch.device("cuda")), config, random.Random("kinds"))


def with_odd_sizes(tiny, changes) -> Config:
    """Passes and micro-batches are on both sides of the number of rows above which chunks have no programs."""
    return tiny(
        {
            **changes,
            "device": "cuda",
            "model.dtype": "bfloat16",
            "model.scratch.hidden": 640,
            "model.scratch.heads": 4,
            "model.scratch.kv_heads": 2,
            "model.scratch.head_dim": 64,
            "model.scratch.mlp": 1216,
            "model.scratch.context": 2048,
            "rollout.max_prompt_tokens": 1400,
            "rollout.max_new_tokens": 400,
            "train.microbatch_tokens": 4096,
            "train.head_chunk_tokens": 2048,
        }
    )


def check(loaded: LoadedModel, config: Config, chance: random.Random) -> None:
    """Samples in all sorts of batches, and compares what was recorded with what the trainer computes."""
    longest = config.rollout.max_prompt_tokens
    torch.manual_seed(0)
    for name, parameter in loaded.model.named_parameters():
        if parameter.dtype == torch.bfloat16 and not name.endswith(SCALE):  # and no code
            parameter.data += 0.1 * torch.randn_like(parameter)
    policy = Policy(loaded, config)
    policy.fuse_blocks(pytest.fail)
    assert not why_not_exact(policy, config, 1)
    make_exact(policy)
    vocabulary = loaded.vocabulary_rows
    prompts = [[chance.randrange(vocabulary) for _ in range(chance.randint(1, longest))] for _ in range(6)]
    requests = [Request(prompt, [chance.randrange(99) for _ in range(chance.choice([1, 3, 8]))]) for prompt in prompts]
    cut = chance.choice([{}, {"top_p": 0.8}, {"top_k": 3}])
    sampling = SamplingParams(chance.choice([3, 70, 400]), config.rollout.temperature, ignore_eos=True, **cut)
    samples = sum(len(request.seeds) for request in requests)
    few = 2 + (longest + 400) // 64  # blocks: of one sample and little more, so that samples are preempted
    for options in ({}, {"chunk": chance.randint(3, 90)}, {"blocks": few}, {"batch": 2, "share_prompts": False}):
        batch = options.pop("batch", chance.choice([samples, 5]))
        engine = PagedEngine(loaded, batch, longest=(longest, 400), **options)
        for _ in range(2):  # the second time from captured graphs
            groups = engine.generate(requests, sampling, no_progress)
        data, recorded = [], []
        for request, group in zip(requests, groups, strict=True):
            for completion in group:
                data.append(Datum.completion(request.prompt, completion.tokens))
                recorded += completion.logprobs
        for tokens in (longest + 400, 4096, 60000):
            train = config.train.model_copy(update={"microbatch_tokens": tokens})
            policy.config = config.model_copy(update={"train": train})
            chance.shuffle(order := list(range(len(data))))
            policy.compute_logprobs("found", [data[place] for place in order], no_progress)
            found = torch.cat([torch.as_tensor(datum.values["found"]).cpu() for datum in data])
            assert torch.equal(found.float(), torch.tensor(recorded)), (options, tokens)


def test_two_updates_on_recorded_logprobs_are_those_on_computed_ones(tmp_path, monkeypatch) -> None:
    """A forward pass for old log-probs would find what was recorded: the weights at the end have the same bits."""
    found = []
    for recorded in (True, False):
        monkeypatch.setattr(GrpoConfig, "records_old_logprobs", recorded)
        changes = {
            **{"device": "cuda", "deterministic": True, "model.dtype": "bfloat16", "model.scratch.head_dim": 64},
            **{"task": TINY["task"], "rollout": {**TINY["rollout"], "exact": True}, "train.steps": 4},
            **{"train.minibatches": 2, "optimizer.lr": 1e-2, "run.folder": str(tmp_path / str(recorded))},
        }
        config = config_of("grpo", changes)
        assert config.needs_old_logprobs is not recorded
        found.append(run(config))
    assert same(*found)
    assert found[0][0][-1]["mismatch_max"] == 0


@pytest.mark.parametrize("window", [None, 40])
def test_gradients_are_those_of_flash_attention(window) -> None:
    torch.manual_seed(0)
    starts = torch.tensor([0, 1, 38, 738, 802], dtype=torch.int32, device="cuda")
    query, grad = (torch.randn(802, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.randn(802, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = []
    for exact in (True, False):
        attention = PackedAttention(starts, 700, 0.1, AttentionKind(window), exact)
        mixed, sums = attention.forward(query, key, value)
        each = (query, *(states.repeat_interleave(4, 1) for states in (key, value)))
        found.append((mixed, sums, *attention.backward(grad, *each, mixed, sums)))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()
