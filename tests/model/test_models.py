"""Every supported family: packed log-probs equal the model's own padded forward, from scratch and from a folder."""

import json
from pathlib import Path

import pytest
import torch

from conftest import FAMILIES, family
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.policy.datum import Datum, trajectory
from ebbtide.policy.packing import pack
from ebbtide.policy.policy import Policy


def trajectories(vocabulary: int) -> list[Datum]:
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 5), (1, 1), (6, 9), (2, 4)]
    return [
        trajectory(
            torch.randint(vocabulary, (prompt,), generator=generator).tolist(),
            torch.randint(vocabulary, (completion,), generator=generator).tolist(),
            [0.0] * completion,
        )
        for prompt, completion in lengths
    ]


def padded_logprobs(model, items: list[Datum]) -> list[torch.Tensor]:
    """The usual way: one padded batch, full logits, the model's own attention."""
    rows = [item.tokens for item in items]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logprobs = model(ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    found = []
    for row, item in enumerate(items):
        start, end = item.targets[0], len(item.tokens)
        found.append(logprobs[row, start - 1 : end - 1].gather(-1, ids[row, start:end, None])[:, 0])
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("budget", [64, 16])
def test_packed_equals_padded(tiny, name, budget) -> None:
    config = tiny({**family(name), "train.microbatch_tokens": budget})
    loaded = load_model(config)
    torch.manual_seed(1)
    for parameter in loaded.model.parameters():  # weights large enough that attention matters
        parameter.data += 0.2 * torch.randn_like(parameter)
    items = trajectories(len(loaded.tokenizer))
    Policy(loaded, config).compute_logprobs("old_logprobs", items, lambda done, of: None)
    with torch.no_grad():
        wanted = padded_logprobs(loaded.model, items)
    for item, reference in zip(items, wanted, strict=True):
        torch.testing.assert_close(item.values["old_logprobs"], reference, rtol=1e-4, atol=1e-4)


def test_a_neighbour_in_the_pack_changes_nothing(tiny) -> None:
    """The check that would catch attention across sequences."""
    config = tiny()
    loaded = load_model(config)
    for parameter in loaded.model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    policy = Policy(loaded, config)
    alone, crowded = trajectories(len(loaded.tokenizer))[2:3], trajectories(len(loaded.tokenizer))
    policy.compute_logprobs("old_logprobs", alone, lambda done, of: None)
    policy.compute_logprobs("old_logprobs", crowded, lambda done, of: None)
    torch.testing.assert_close(alone[0].values["old_logprobs"], crowded[2].values["old_logprobs"], rtol=1e-5, atol=1e-5)


def test_sliding_window(tiny) -> None:
    config = tiny(family("mistral"))
    loaded = load_model(config)
    loaded.model.config.sliding_window = 4
    for layer in loaded.model.model.layers:
        if hasattr(layer.self_attn, "sliding_window"):
            layer.self_attn.sliding_window = 4
    for parameter in loaded.model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    items = trajectories(len(loaded.tokenizer))
    policy = Policy(loaded, config)
    policy.compute_logprobs("old_logprobs", items, lambda done, of: None)
    with torch.no_grad():
        wanted = padded_logprobs(loaded.model, items)
    for item, reference in zip(items, wanted, strict=True):
        torch.testing.assert_close(item.values["old_logprobs"], reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_from_a_folder_and_verifies_itself(tiny, tmp_path, name) -> None:
    made = load_model(tiny(family(name)))
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    config = tiny({"model": {"path": str(tmp_path)}})
    loaded = load_model(config)
    assert loaded.tokenizer("12=")["input_ids"] == made.tokenizer("12=")["input_ids"]
    for key, value in made.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[key])
    Policy(loaded, config).verify()


def test_verify_refuses_a_head_it_does_not_know(tiny, monkeypatch) -> None:
    config = tiny()
    policy = Policy(load_model(config), config)
    policy.model.lm_head.register_forward_hook(lambda module, args, logits: logits * 3)
    for parameter in policy.model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    with pytest.raises(UserError, match="differ from the model's own"):
        policy.verify()


def test_same_seed_same_weights_and_other_seed_others(tiny) -> None:
    first, again, other = (load_model(tiny({"seed": seed})).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_bfloat16_on_the_cpu(tiny) -> None:
    config = tiny({"model.dtype": "bfloat16"})
    policy = Policy(load_model(config), config)
    assert policy.model.dtype == torch.bfloat16
    for parameter in policy.model.parameters():  # with weights as small as new ones a wrong forward would look right
        parameter.data += 0.2 * torch.randn_like(parameter)
    policy.verify()
    projection = policy.model.model.layers[0].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, out: out * 3 if out.shape[1] > 14 else out)
    with pytest.raises(UserError, match="differ from the model's own"):
        policy.verify()


def test_a_model_with_weights_missing_is_refused(tiny, tmp_path) -> None:
    made = load_model(tiny())
    weights = {name: tensor for name, tensor in made.model.state_dict().items() if "layers.1." not in name}
    made.model.save_pretrained(tmp_path, state_dict=weights)
    made.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks .* of the model's weights.*layers\.1\."):
        load_model(tiny({"model": {"path": str(tmp_path)}}))


def test_a_tokenizer_may_have_added_tokens_without_a_row(tiny, tmp_path) -> None:
    made = load_model(tiny())
    made.tokenizer.add_special_tokens({"additional_special_tokens": [f"<{number}>" for number in range(40)]})
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    config = tiny({"model": {"path": str(tmp_path)}})
    loaded = load_model(config)
    assert len(loaded.tokenizer) == loaded.vocabulary_rows + 40
    Policy(loaded, config).verify()
    made.tokenizer.eos_token = "<7>"
    made.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=rf"end token '<7>' has the id {loaded.vocabulary_rows + 7}, .* only {loaded.vocabulary_rows} rows",
    ):
        load_model(config)
    scratch_tokenizer("0123456789=abc").save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=rf"{loaded.vocabulary_rows + 3} tokens, but the model's embedding only {loaded.vocabulary_rows} rows",
    ):
        load_model(config)


def test_pack_covers_all(tiny) -> None:
    items = trajectories(11)
    batches = pack(items, 16, torch.device("cpu"))
    assert sorted(member for batch in batches for member in batch.members) == [0, 1, 2, 3]


def test_weights_in_a_pickle_are_refused(tiny, tmp_path) -> None:
    """Whether they would run something or not."""
    model, tokenizer = load_model(tiny()).model, scratch_tokenizer("0123456789=")
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (ran,)

    config = tiny({"model": {"path": str(tmp_path)}})
    for weights in (model.state_dict(), {"w": Hostile()}):
        torch.save(weights, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"has its weights in pytorch_model.bin, a pickle.*only safetensors are"):
            load_model(config)
    index = {"metadata": {}, "weight_map": {"w": "pytorch_model.bin"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="could not be loaded"):
        load_model(config)
    assert not ran.exists()
