"""What becomes of one type of model: whether tiny copies of it are trained with both engines, and how far packed and
sampled log-probs are from transformers' own forward of each sequence alone, in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.algorithms.loop import train
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.model.families import FAMILIES
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.policy.datum import Datum
from ebbtide.policy.losses import LossInputs
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.report.report import Report
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams
from ebbtide.rollout.huggingface_check import build_checked_engine
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.verify import build_verified_engine
from tiny_families import ROWS, TOKENIZER, tiny_model

FUSED, TRAINED, HUGGING_FACE, PAGED = "trained, fused", "trained", "Hugging Face engine only", "paged engine only"
REFUSED, DIFFERS, CRASHES, NOT_BUILT = "refused", "differs", "crashes", "not built"
OUTCOMES = FUSED, TRAINED, HUGGING_FACE, PAGED, REFUSED, DIFFERS, CRASHES, NOT_BUILT
ENGINES = {"huggingface": PAGED, "paged": HUGGING_FACE}
"""The outcome if an engine is the only one that refuses a model."""
CLOSE = 1e-5
"""The largest mean difference of log-probs that is rounding."""
CLOSE_GRADIENTS = 1e-4
"""The same for the difference of all gradients, relative to their norm."""
LENGTHS = 45, 23, 34
"""Tokens of the packed sequences: all go past every window of a tiny model."""
PROMPTS = 21, 3, 12
"""Tokens of the prompts that are sampled from at once; one is shorter than a window."""
NEW = 12
"""Tokens of a sample."""


@dataclass
class Finding:
    """What became of a type."""

    name: str
    outcome: str = TRAINED
    reason: str = ""
    """What Ebbtide said, what was raised, or what differs."""
    figures: dict[str, float] = field(default_factory=dict)
    """Differences by name."""

    @property
    def trains(self) -> bool:
        return self.outcome in (TRAINED, FUSED)


class _EndedError(Exception):
    """The examination is over."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@contextmanager
def _stage(what: str, refused: str, crashed: str = CRASHES) -> Iterator[None]:
    """What is raised inside is the outcome: `refused` if Ebbtide says why it does not run the model."""
    try:
        yield
    except UserError as error:
        raise _EndedError(refused, _sentence(str(error))) from error
    except _EndedError:
        raise
    except Exception as error:  # Whatever a model of transformers may raise is a row of the table.
        raise _EndedError(crashed, f"{what}: {type(error).__name__}: {_sentence(str(error))}") from error


def _sentence(text: str) -> str:
    return " ".join(text.split())[:400]


def examine(name: str, folder: Path) -> Finding:
    """Examines the type or variant `name` with all files in `folder`."""
    finding = Finding(name)
    try:
        _examine(finding, folder)
        if name.partition(",")[0] in FAMILIES:
            finding.outcome = FUSED
    except _EndedError as found:
        finding.outcome, finding.reason = found.outcome, found.reason.replace(f"{folder}/", "")
    return finding


def _examine(finding: Finding, folder: Path) -> None:
    figures = finding.figures
    with _stage("transformers", NOT_BUILT, NOT_BUILT):
        made = tiny_model(finding.name)
        sequences = _sequences()
        before = [own_logprobs(made, tokens).detach() for tokens in sequences]
        if not all(one.isfinite().all() for one in before):
            raise ValueError("its own log-probs are not finite")
        made.save_pretrained(folder / "model")
        TOKENIZER.save_pretrained(folder / "model")
    config = _config(folder, "paged")
    with _stage("load", REFUSED):
        loaded = load_model(config)
    with _stage("transformers", NOT_BUILT, NOT_BUILT):
        own = [own_logprobs(loaded.model, tokens) for tokens in sequences]
        figures["reload"] = _mean(own, before)
        if figures["reload"] > CLOSE:
            raise ValueError(f"the saved and loaded model's own log-probs differ by {figures['reload']:.2g}")
        own_gradients = _gradients(loaded.model, (-torch.cat(own).mean()).backward)
        own = [one.detach() for one in own]
    with _stage("packed", REFUSED):
        policy = Policy(loaded, config)
        policy.verify()
        data = [Datum.completion(tokens[:1], tokens[1:]) for tokens in sequences]
        policy.compute_logprobs("packed", data, no_progress)
        gradients = _gradients(loaded.model, lambda: policy.forward_backward(data, _mean_logprob, no_progress))
    packed = [datum.values["packed"] for datum in data]
    figures |= {"packed, mean": _mean(packed, own), "packed, max": _max(packed, own)}
    figures["gradients"] = _relative(gradients, own_gradients)
    _refuse_difference("packed", figures["packed, mean"])
    if not figures["gradients"] <= CLOSE_GRADIENTS:
        raise _EndedError(DIFFERS, f"gradients of packed sequences differ by {figures['gradients']:.2g} of their norm")
    found = [one for one in (_engine(figures, folder, loaded, name) for name in ENGINES) if one is not None]
    if found:
        worst = max(found, key=lambda one: OUTCOMES.index(one.outcome))
        refused = len(found) == len(ENGINES) and worst.outcome in ENGINES.values()
        raise _EndedError(REFUSED if refused else worst.outcome, "; ".join(one.reason for one in found))


def _engine(figures: dict[str, float], folder: Path, loaded: LoadedModel, name: str) -> _EndedError | None:
    """What is wrong with an engine for a model, if anything is."""
    longest = max(PROMPTS), NEW
    try:
        with _stage(f"{name} engine", ENGINES[name]):
            if name == "huggingface":
                _sampled(figures, name, build_checked_engine(loaded, 4, sum(longest)), loaded.model)
            else:
                _sampled(figures, name, build_verified_engine(loaded, 8, longest=longest, samples=2), loaded.model)
                tight = PagedEngine(loaded, 4, block=4, chunk=6, blocks=14, longest=longest)
                _sampled(figures, f"{name}, tight", tight, loaded.model)
                assert tight.preempted  # It has blocks for two thirds of what it is asked for.
            _step(figures, folder, name, loaded.model)
    except _EndedError as found:
        return found
    return None


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, ROWS, (length,), generator=generator).tolist() for length in LENGTHS]


def own_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Of all tokens but the first, by transformers' own forward of this sequence alone."""
    ids, before = torch.tensor([tokens]), model.config._attn_implementation
    model.set_attn_implementation("eager")  # A few types have only another one, and keep it.
    logits = model(ids, use_cache=False).logits[0, :-1].float()
    model.set_attn_implementation(before)
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def _gradients(model: PreTrainedModel, backward: Callable[[], object]) -> dict[str, Tensor]:
    backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _mean_logprob(inputs: LossInputs) -> Tensor:
    return -inputs.logprobs.mean()


def _mean(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return (torch.cat(list(some)) - torch.cat(list(others))).abs().mean().item()


def _max(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return (torch.cat(list(some)) - torch.cat(list(others))).abs().max().item()


def _relative(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The norm of the difference of gradients, relative to the norm of `others`."""
    zero = torch.zeros(())
    squares = sum((some.get(key, zero) - others.get(key, zero)).square().sum().item() for key in some | others)
    return float((squares / sum(one.square().sum().item() for one in others.values())) ** 0.5)


def _refuse_difference(what: str, difference: float) -> None:
    if not difference <= CLOSE:
        raise _EndedError(DIFFERS, f"{what}: log-probs differ from transformers' own by {difference:.2g} on average")


def _sampled(figures: dict[str, float], what: str, engine: Engine, model: PreTrainedModel) -> None:
    """Compares log-probs of sampled tokens with the model's own: of prompts of different lengths at once, two samples
    each."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, ROWS, (length,), generator=generator).tolist() for length in PROMPTS]
    requests = [Request(prompt, [number, 7 + number]) for number, prompt in enumerate(prompts)]
    groups: list[list[Completion]] = engine.generate(requests, SamplingParams(NEW, ignore_eos=True), no_progress)
    pairs = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    with torch.no_grad():
        own = [own_logprobs(model, prompt + sample.tokens)[len(prompt) - 1 :] for prompt, sample in pairs]
    found = [torch.tensor(sample.plain_logprobs) for _, sample in pairs]
    figures |= {f"{what}, mean": _mean(found, own), f"{what}, max": _max(found, own)}
    _refuse_difference(what, figures[f"{what}, mean"])


def mismatch_in_16_bits(name: str, folder: Path) -> float:
    """How far log-probs of the paged engine and of the trainer are apart on average in a step of GRPO in bfloat16."""
    tiny_model(name).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    config = _config(folder, "paged", "bfloat16")
    with Report(config, "survey") as report:
        train(config, report)
    (line,) = (folder / "paged" / "metrics.jsonl").read_text().splitlines()
    found: float = json.loads(line)["mismatch"]
    return found


def _config(folder: Path, engine: str, dtype: str = "float32") -> GrpoConfig:
    problems = folder / "problems.jsonl"
    if not problems.exists():
        texts = ("What is the sum of 12 and 30?", "Count to ten.", "Spell the word tide backwards, please", "Say yes")
        lines = [{"prompt": text, "answer": r"[a-zA-Z](.|\n)*"} for text in texts * 2]
        problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return GrpoConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(folder / "model"), "dtype": dtype},
            "task": {
                "file": {"train": str(problems), "scorer": "regex"},
                "held_out": 1,
                "scoring": {"workers": 1},
            },
            "rollout": {
                "engine": engine,
                "prompts_per_step": 3,
                "group_size": 4,
                "max_prompt_tokens": 40,
                "max_new_tokens": NEW,
            },
            "train": {"steps": 1, "microbatch_tokens": 128},
            "optimizer": {"lr": 1e-3},
            "run": {"folder": str(folder / engine)},
        }
    )


def _step(figures: dict[str, float], folder: Path, engine: str, untrained: PreTrainedModel) -> None:
    """One step of GRPO, as `ebbtide train` does it."""
    config, before = _config(folder, engine), untrained.state_dict()
    with Report(config, "survey") as report:
        policy = train(config, report)
    after = policy.model.state_dict()
    if not all(weight.isfinite().all() for weight in after.values()):
        raise _EndedError(DIFFERS, f"{engine}: weights are not finite after a step")
    if all(torch.equal(before[name], after[name]) for name in before):
        raise _EndedError(DIFFERS, f"{engine}: a step changed nothing")
    (line,) = (folder / engine / "metrics.jsonl").read_text().splitlines()
    mismatch = figures[f"{engine}, mismatch"] = json.loads(line)["mismatch"]
    _refuse_difference(f"a step with {engine}", mismatch)
