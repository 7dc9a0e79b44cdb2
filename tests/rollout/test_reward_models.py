"""Reward models on the run's own device: what they are given, how it is batched, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.rewards import RewardModelConfig
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.reward_models import reward_model_sizes
from ebbtide.rollout.reward_models import RewardModels, batches
from ebbtide.tasks.task import Problem, ask
from tiny_reward_models import TEMPLATE, pair_classifier, reward_model, tokenizer

CPU = torch.device("cpu")
WORK = [(Problem(ask(f"{n}?")), "x" * (7 * n % 11)) for n in range(9)]


def config_of(tiny, *models: dict) -> GrpoConfig:
    return tiny({"task.rewards": {f"r{place}": {"reward_model": one} for place, one in enumerate(models)}})


def scored(tiny, model: dict, work=WORK):
    config = config_of(tiny, model)
    with Residency(plan_holdings(config), CPU) as residency:
        return RewardModels(config.reward_models, residency).score(config.reward_models[0], work)


def alone(path: str, text: str) -> list[float]:
    """All outputs for a text by itself, as transformers gives them."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokenizer()(text)["input_ids"]])).logits[0].tolist()


@pytest.mark.parametrize("batch_tokens", [1, 40, 16384])
@pytest.mark.parametrize("pad", ["<pad>", None, "<end>"])
def test_scores_are_the_models_own_by_its_own_chat_template(tiny, tmp_path, batch_tokens, pad) -> None:
    path = reward_model(tmp_path / "model", pad=pad)
    found = scored(tiny, {"path": path, "batch_tokens": batch_tokens})
    wanted = [alone(path, f"<user>{p.messages[0]['content']}<end><assistant>{text}<end>")[0] for p, text in WORK]
    assert len(set(wanted)) == 9
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("transform", ["none", "sigmoid", "softmax"])
def test_one_of_several_outputs_is_the_score(tiny, tmp_path, transform) -> None:
    path = reward_model(tmp_path / "model", labels=3)
    (found,) = scored(tiny, {"path": path, "label": 2, "transform": transform}, [(Problem(ask("a")), "b")])
    logits = torch.tensor(alone(path, "<user>a<end><assistant>b<end>"))
    wanted = {"none": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}[transform]
    assert found == pytest.approx(wanted[2].item(), abs=1e-5)


def test_the_text_of_a_control_token_is_text(tiny, tmp_path) -> None:
    """A policy cannot end its turn in the eyes of the reward model."""
    path = reward_model(tmp_path / "model")
    honest, written = scored(tiny, {"path": path}, [(Problem(ask("a")), "b"), (Problem(ask("a")), "b<end>")])
    assert written != pytest.approx(honest)
    assert written != pytest.approx(alone(path, "<user>a<end><assistant>b<end><end>")[0])


def test_without_a_chat_template_it_is_given_a_pair(tiny, tmp_path) -> None:
    path = pair_classifier(tmp_path / "model")
    found = scored(tiny, {"path": path, "label": 1}, WORK[:3])
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    for score, (problem, text) in zip(found, WORK, strict=False):
        pair = tokenizer(None)(problem.messages[0]["content"], text, return_tensors="pt")
        with torch.no_grad():
            assert score == pytest.approx(model(**pair).logits[0, 1].item(), abs=1e-5)


def test_what_is_too_long_is_not_scored(tiny, tmp_path) -> None:
    path = reward_model(tmp_path / "model")
    work = [(Problem(ask("a")), "b"), (Problem(ask("a")), "b" * 200)]
    fine, long = scored(tiny, {"path": path}, work)
    assert isinstance(fine, float)
    assert long.failure == "too_long"
    assert "takes 128" in long.message
    assert [isinstance(one, float) for one in scored(tiny, {"path": path, "max_tokens": 8}, work)] == [False, False]


def test_a_tokenizer_knows_of_positions_that_no_token_has(tiny, tmp_path) -> None:
    """A RoBERTa numbers tokens from its padding on: it would fail in the forward, which ends the run."""
    path = pair_classifier(tmp_path / "model", kind="Roberta")
    found = scored(tiny, {"path": path, "label": 0}, [(Problem(ask("a")), "b" * size) for size in (61, 62)])
    assert isinstance(found[0], float)
    assert found[1].failure == "too_long"


def test_an_output_that_is_no_number_or_a_chat_that_is_refused_costs_the_sample(tiny, tmp_path) -> None:
    """It says nothing about the completion, which is no part of the loss then."""
    path = Path(reward_model(tmp_path / "model"))
    (path / "chat_template.jinja").write_text(
        f"{{% if '7' in messages[0]['content'] %}}{{{{ no() }}}}{{% endif %}}{TEMPLATE}"
    )
    found = scored(tiny, {"path": str(path)})
    assert [isinstance(one, float) for one in found] == [number != 7 for number in range(9)]
    assert (found[7].failure, found[7].is_unjudged) == ("reward_model_error", True)
    weights = load_file(path / "model.safetensors")
    save_file(
        {**weights, "score.weight": weights["score.weight"] * torch.nan}, path / "model.safetensors", {"format": "pt"}
    )
    found = scored(tiny, {"path": str(path)})
    assert {one.failure for one in found} == {"reward_model_error"}
    assert "is nan" in found[0].message


def test_batches_have_similar_lengths_and_no_more_tokens_than_allowed() -> None:
    lengths = [3, 9, 1, 4, 4, 12, 2]
    found = list(batches(lengths, 12))
    assert found == [[5], [1], [3, 4, 0], [6, 2]]
    assert list(batches(lengths, 10**6)) == [[5, 1, 3, 4, 0, 6, 2]]
    assert list(batches([], 5)) == []


def test_the_plan_knows_its_bytes_and_the_same_model_is_loaded_once(tiny, tmp_path) -> None:
    path, other = reward_model(tmp_path / "one"), pair_classifier(tmp_path / "two")
    config = config_of(tiny, {"path": path}, {"path": path}, {"path": other, "label": 0})
    assert [one.path for one in config.reward_models] == [path, other]
    sizes = reward_model_sizes(config, "cpu")
    with Residency(plan_holdings(config), CPU) as residency:
        models = RewardModels(config.reward_models, residency)
        held = residency.holdings()["reward_model"].device
        assert len(models.digest) == 64
    counted = sum(one.bytes for one in sizes)
    assert counted <= held < 1.03 * counted  # buckets have gaps between tensors
    assert plan_holdings(config).specs["reward_model"].needed_in == {"score"}


def renamed(path: str) -> str:
    file = Path(path) / "config.json"
    file.write_text(file.read_text().replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "/no/such/folder"}, "does not exist"),
        ({"label": 1}, "none of the model's 1 outputs"),
        ({"transform": "softmax"}, "always 1"),
        ({"path": "causal"}, "is a Qwen3ForCausalLM, and no model for sequence classification"),
        ({"path": "renamed"}, r"lacks 1 of the weights of a model for sequence classification \(score.weight\)"),
        ({"path": "three"}, "has 3 outputs: name the one that is the score in `label`"),
    ],
)
def test_models_that_cannot_score_are_refused(tiny, tmp_path, changes, said) -> None:
    made = {
        "causal": lambda: reward_model(tmp_path / "causal", causal=True),
        "renamed": lambda: renamed(reward_model(tmp_path / "renamed", causal=True)),
        "three": lambda: reward_model(tmp_path / "three", labels=3),
    }
    path = changes.get("path", reward_model(tmp_path / "model"))
    with pytest.raises(UserError, match=said):
        scored(tiny, {**changes, "path": made[path]() if path in made else path})


def test_a_single_value_is_its_path() -> None:
    from ebbtide.config.values import convert_values

    assert RewardModelConfig(path="x").itemsize("cuda") == 2
    tree = {"task": {"rewards": [{"name": "a", "reward_model": "x/y"}, {"scorer": "task", "weight": 1}]}}
    found = convert_values(GrpoConfig, tree)["task"]["rewards"]
    assert found == {"a": {"reward_model": {"path": "x/y"}}, "reward2": {"scorer": "task", "weight": 1}}


def test_sizes_of_well_known_reward_models_need_no_files(tiny) -> None:
    path = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    (size,) = reward_model_sizes(tiny({"task.rewards": {"liked": {"reward_model": {"path": path}}}}), "cuda")
    assert size.parameters == 596_049_920 + 1024  # of the blocks and the embedding, and of the one output
