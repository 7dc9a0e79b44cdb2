"""Several adapters of one model, served at once: each sample has what its own adapter computes alone."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from queue import SimpleQueue

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import TINY, family, merged
from ebbtide.checkpoint.initial import find_adapters, with_runs_as_models
from ebbtide.checkpoint.initial_model import load_initial
from ebbtide.checkpoint.served_adapters import load_adapters
from ebbtide.config import load_serve
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError
from ebbtide.launch.serve import serve
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.model.lora import adapted_layers, add_adapters
from ebbtide.model.peft_format import write_adapter
from ebbtide.model.row_adapters import RowAdapters, row_adapter_bytes, row_adapters
from ebbtide.rollout.engine import Completion, Request, SamplingParams
from ebbtide.rollout.paged import cache_memory, cpu_runner
from ebbtide.rollout.paged.cpu_runner import CpuRunner
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.verify import build_verified_engine
from ebbtide.rollout.serve.queue import RequestQueue
from families import SHAPE, TOKENIZER
from patience import PATIENCE
from test_cli import ebbtide
from test_lora_runs import run as train_run

CPU = torch.device("cpu")
GREEDY = SamplingParams(12, 0.0, ignore_eos=True)
PROMPTS = [[1, 5, 2, 7, 3], [4, 4, 9], [2, 8, 8, 1, 6, 6, 3, 9]]
KINDS = {
    "math": LoraConfig(rank=4, alpha=6),
    "code": LoraConfig(rank=3, alpha=7, targets=["q_proj", "v_proj", "down_proj"]),
    "wide": LoraConfig(rank=11, alpha=32, exclude=["k_proj", "gate_proj"]),
}


def write_base(folder: Path, changes: dict | None = None) -> Path:
    """A model with weights that matter, in a folder."""
    config = GrpoConfig.model_validate(merged(TINY, changes or {}))
    torch.manual_seed(config.seed)
    loaded = load_model(config, CPU)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def settings(base: Path, adapter: Path | str | None = None) -> GrpoConfig:
    lora = {} if adapter is None else {"lora": {"adapter": str(adapter)}}
    config = GrpoConfig.model_validate(merged(TINY, {"model": {"path": str(base), "dtype": "float32", **lora}}))
    return with_runs_as_models(config, print)


def write_adapters(base: Path) -> dict[str, str]:
    """Name -> a folder of an adapter that adds something, in PEFT's format."""
    for seed, (name, lora) in enumerate(KINDS.items()):
        model = load_model(settings(base), CPU).model
        add_adapters(model, lora, seed)
        generator = torch.Generator().manual_seed(seed)
        for layer in adapted_layers(model).values():
            layer.lora_B.data.normal_(std=0.3, generator=generator)
        (base.parent / name).mkdir()
        write_adapter(model, lora, str(base), base.parent / name)
    return {name: str(base.parent / name) for name in KINDS}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("served") / "base")


@pytest.fixture(scope="module")
def folders(base) -> dict[str, str]:
    return write_adapters(base)


def with_all(base: Path, places: dict[str, str]) -> LoadedModel:
    loaded = load_model(settings(base), CPU)
    load_adapters(loaded.model, find_adapters(places, print))
    return loaded


def generate(loaded: LoadedModel, requests: list[Request], sampling=GREEDY, **engine) -> list[list[Completion]]:
    return PagedEngine(loaded, 16, block=4, **engine).generate(requests, sampling, lambda *_: None)


def compare(found: list[Completion], wanted: list[Completion]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.plain_logprobs == pytest.approx(theirs.plain_logprobs, abs=1e-4)


# The engine


def check_together_and_alone(base: Path, folders: dict[str, str]) -> None:
    together = with_all(base, folders)
    numbers = [0, *range(1, len(folders) + 1)]
    mixed = generate(together, [Request(prompt, [0], number) for prompt in PROMPTS for number in numbers])
    for number, adapter in zip(numbers, (None, *folders.values()), strict=True):
        alone = generate(load_initial(settings(base, adapter), CPU), [Request(prompt, [0]) for prompt in PROMPTS])
        for prompt, wanted in enumerate(alone):
            compare(mixed[prompt * len(numbers) + number], wanted)
    # The same prompt with each adapter and with none: none of them has keys and values of another.
    for prompt in range(len(PROMPTS)):
        first = [round(mixed[prompt * len(numbers) + number][0].plain_logprobs[0], 3) for number in numbers]
        assert len({*first}) == len(numbers)


def test_each_sample_has_what_its_adapter_computes_alone(base, folders, monkeypatch) -> None:
    decoded: list[set[int]] = []
    decode = CpuRunner.decode

    def watched(self, ops):
        decoded.append({op.sample.group.adapter for op in ops})
        return decode(self, ops)

    monkeypatch.setattr(CpuRunner, "decode", watched)
    check_together_and_alone(base, folders)
    assert {0, 1, 2, 3} in decoded  # in one batch


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_other_families(tmp_path, name: str) -> None:
    base = write_base(tmp_path / "base", family(name))
    check_together_and_alone(base, write_adapters(base))


def test_a_family_without_fused_blocks(tmp_path) -> None:
    assert "cohere" not in FAMILIES
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **SHAPE, initializer_range=0.2))
    model.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    check_together_and_alone(tmp_path / "base", write_adapters(tmp_path / "base"))


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_that_are_preempted_keep_their_adapter(base, folders, ahead: bool) -> None:
    loaded = with_all(base, folders)
    requests = [Request(prompt, [0, 1], number) for prompt in PROMPTS for number in (0, 1, 2, 3)]
    sampling = SamplingParams(12, 1.0, ignore_eos=True)
    wanted = generate(loaded, requests, sampling)
    engine = PagedEngine(loaded, 16, block=4, blocks=12, chunk=7, ahead=ahead, share_prompts=False)
    found = engine.generate(requests, sampling, lambda *_: None)
    assert engine.preempted > 0
    for mine, theirs in zip(found, wanted, strict=True):
        compare(mine, theirs)


def test_log_probs_are_those_of_peft(base, folders) -> None:
    peft = pytest.importorskip("peft")
    loaded = with_all(base, folders)
    requests = [Request(prompt, [3], number) for prompt in PROMPTS for number in (1, 2, 3)]
    found = generate(loaded, requests, SamplingParams(12, 1.0, ignore_eos=True))
    for number, folder in enumerate(folders.values(), 1):
        theirs = peft.PeftModel.from_pretrained(load_model(settings(base), CPU).model, folder)
        for request, (mine,) in zip(requests, found, strict=True):
            if request.adapter == number:
                ids = torch.tensor([request.prompt + mine.tokens])
                with torch.no_grad():
                    logprobs = theirs(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
                wanted = logprobs.gather(1, torch.tensor(mine.tokens)[:, None])[:, 0]
                assert mine.plain_logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_in_bfloat16_a_scale_is_not_rounded(base, folders) -> None:
    loaded = with_all(base, folders)
    rows = row_adapters(loaded.model)
    layer = loaded.model.bfloat16().model.layers[0].self_attn.q_proj
    x = torch.randn(6, 32).bfloat16()
    with torch.no_grad(), rows.chosen(torch.tensor([2])):
        mask = rows.mask(layer.columns)
        assert layer(x).dtype == torch.bfloat16
    assert mask.unique().tolist() == pytest.approx([0, 7 / 3], rel=1e-7)
    assert mask.shape == (1, 4 + 3 + 11)


def test_the_engine_is_compared_with_the_models_own_forward_of_an_adapter(base, folders, monkeypatch) -> None:
    loaded = with_all(base, folders)
    build_verified_engine(loaded, 4, longest=(24, 8))
    monkeypatch.setattr(cpu_runner, "row_adapters", lambda model: RowAdapters([1.0] * 3))  # not the one of its layers
    with pytest.raises(UserError, match="which is more than rounding"):
        build_verified_engine(loaded, 4, longest=(24, 8))


def test_the_cache_leaves_room_for_the_adapters_of_a_pass(base, folders, monkeypatch) -> None:
    monkeypatch.setattr(cache_memory, "_free_bytes", lambda device: 10_000_000)
    needs = cache_memory.CacheNeeds(10**9, 1, 1, 1, 1)
    plain, loaded = load_model(settings(base), CPU), with_all(base, folders)
    counts = [PagedEngine(one, 4, block=4, chunk=1000)._memory.find_size(needs).blocks for one in (plain, loaded)]
    columns = 7 * 4 + 3 * 3 + 5 * 11  # layers of a block that each has, times its rank
    assert row_adapter_bytes(loaded.model, 1000) == 1000 * columns * (4 + 4)
    block = 4 * 2 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, heads, channels, bytes
    assert counts[0] - counts[1] == pytest.approx(0.95 * 1000 * columns * 8 / block, abs=1)


# The server


def test_clients_choose_by_name(base, folders, tmp_path, monkeypatch) -> None:
    """Over HTTP, all at once: the base, adapters of PEFT, and one of a run."""
    model = {"path": str(base), "lora": {"rank": 4}, "chat_template": False}
    train_run(tmp_path / "run", {"model": model, "train.steps": 2})
    places = {"math": folders["math"], "code": folders["code"], "mine": str(tmp_path / "run")}
    (adapter,) = find_adapters({"mine": places["mine"]}, print)
    assert not adapter.is_templated
    said: SimpleQueue[str] = SimpleQueue()
    found: SimpleQueue = SimpleQueue()
    queue = RequestQueue(100, PATIENCE)
    monkeypatch.setattr("ebbtide.launch.serve.RequestQueue", lambda *_: queue)

    async def ask(url: str) -> tuple:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            names = ["small", "math", "code", "mine"]
            how = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
            extra = {"ignore_eos": True, "return_token_ids": True}
            answers = await asyncio.gather(
                *(client.completions.create(model=name, **how, extra_body=extra) for name in names)
            )
            unnamed = httpx.post(f"{url}/completions", json={**how, **extra}, timeout=PATIENCE).json()
            unknown = httpx.post(f"{url}/completions", json={**how, "model": "maths"}, timeout=PATIENCE)
            models = httpx.get(f"{url}/models", timeout=PATIENCE).json()["data"]
            one = httpx.get(f"{url}/models/code", timeout=PATIENCE).json()
            return answers, unnamed, unknown, models, one

    def client() -> None:
        try:
            while not (at := re.search(r"serving small, math, code, mine at (\S+):|over", said.get(timeout=PATIENCE))):
                pass
            found.put(asyncio.run(ask(at[1])))
        except BaseException as error:
            found.put(error)
        finally:
            queue.stop()

    thread = threading.Thread(target=client)
    config = load_serve(
        ["port=0", "device=cpu", "name=small", "max_length=40", *(f"lora.{k}={v}" for k, v in places.items())]
    )
    thread.start()
    try:
        serve(str(base), config, None, said.put)
    finally:
        said.put("over")
        thread.join(PATIENCE)
    result = found.get(timeout=PATIENCE)
    if isinstance(result, BaseException):
        raise result
    answers, unnamed, unknown, models, one = result
    tokens = [answer.choices[0].token_ids for answer in answers]
    for answer, name, place in zip(answers, ("small", *places), (None, *places.values()), strict=True):
        assert answer.model == name
        ((alone,),) = generate(load_initial(settings(base, place), CPU), [Request(PROMPTS[0], [0])])
        assert answer.choices[0].token_ids == alone.tokens
    assert len({tuple(one) for one in tokens[:3]}) == 3
    assert (unnamed["model"], unnamed["choices"][0]["token_ids"]) == ("small", tokens[0])
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "'small', 'math', 'code', 'mine'" in unknown.json()["error"]["message"]
    assert [model["id"] for model in models] == ["small", "math", "code", "mine"]
    assert [model.get("parent") for model in models] == [None, "small", "small", "small"]
    assert one == models[2]


# What is refused


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lora.a!b=x", "names an adapter 'a!b', and a name has 1 to 64 letters"),
        ("lora.-a=x", "names an adapter '-a'"),
        ("lora={a b: x}", "names an adapter 'a b'"),
        ("lora.v1.5=x", r"`lora.v1` is {'5': 'x'} and should be a folder: write `lora.NAME=FOLDER`, with no dot"),
        ("lora.a=3", "`lora.a` is 3 and should be a folder"),
        ("lora.a=", "`lora.a` is '' and should be a folder"),
        ("lora=x", "`lora` is 'x', and each adapter has a name: write `lora.NAME=FOLDER`"),
    ],
)
def test_names_that_cannot_be(given: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says) if "{" in says else says):
        load_serve([given])


def test_settings_name_adapters() -> None:
    assert load_serve(["lora.math=a", "lora.my-code_2=b/c"]).lora == {"math": "a", "my-code_2": "b/c"}
    assert load_serve(["lora={math: a, code: b}", "lora.code=c"]).lora == {"math": "a", "code": "c"}


def refused(model: Path, says: str, **places: str) -> None:
    config = load_serve(["port=0", "device=cpu", *(f"lora.{name}={place}" for name, place in places.items())])
    with pytest.raises(UserError, match=says):
        serve(str(model), config, None, print)


def test_a_missing_folder_ends_the_command_with_2(base, capsys) -> None:
    code, _, err = ebbtide(capsys, "serve", str(base), "lora.math=./nowhere")
    assert code == 2
    assert "`lora.math: ./nowhere` is neither a folder with an adapter_config.json nor a run" in " ".join(err.split())


def test_adapters_that_do_not_fit_are_named_by_their_key(base, folders, tmp_path) -> None:
    refused(base, "`lora.base` has the name of the model itself: choose another, or set `name`", base=folders["math"])
    other = write_base(tmp_path / "other", {"model.scratch.mlp": 64})
    refused(other, r"`lora.math: .*` was trained on another model than the one here", math=folders["math"])
    file = Path(folders["math"]) / "adapter_model.safetensors"
    kept, tensors = file.read_bytes(), load_file(file)
    try:
        save_file(tensors, file)  # without the digest
        refused(other, r"`lora.math: .*` does not fit the model: .*mlp.*, not \[", math=folders["math"])
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, file)
        refused(base, r"`lora.math: .*` has numbers that are not finite, in model\.layers", math=folders["math"])
    finally:
        file.write_bytes(kept)
    settings_file = Path(folders["code"]) / "adapter_config.json"
    text = settings_file.read_text()
    try:
        settings_file.write_text(text.replace("q_proj", "query"))
        refused(base, r"`lora.code: .*` names `query`, and the linear layers of the", code=folders["code"])
        settings_file.write_text(text.replace('"use_dora": false', '"use_dora": true'))
        refused(base, r"`lora.code: .*` has `use_dora: True`, which is not supported", code=folders["code"])
    finally:
        settings_file.write_text(text)


def test_runs_that_do_not_fit_are_named_by_their_key(base, folders, tmp_path) -> None:
    train_run(tmp_path / "full", {"model.lora": None, "train.steps": 1, "checkpoint": {"every": 1}})
    refused(base, r"`lora.a: .*` is of a run that trained all weights: name it in place of", a=str(tmp_path / "full"))
    steps = {"train.steps": 1, "checkpoint": {"every": 1}}
    train_run(tmp_path / "run", {"model": {"path": str(base), "lora": {"rank": 4}}, **steps})
    other = write_base(tmp_path / "other", {"seed": 5})
    refused(other, r"`lora.a: .*`: the adapters in .* were trained on another model", a=str(tmp_path / "run"))
    refused(tmp_path / "run", "`lora`: the model is a run with adapters of its own: serve", math=folders["math"])


def test_a_mixture_of_experts_is_refused(folders, tmp_path) -> None:
    base = write_base(tmp_path / "base", family("qwen3_moe"))
    refused(base, "`lora`: adapters by name for a mixture of experts are not supported", math=folders["math"])
