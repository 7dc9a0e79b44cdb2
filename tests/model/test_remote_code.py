"""A model folder may carry Python code: none of it is ever run, and nobody is asked whether it may be."""

import json

import pytest

from ebbtide.cli import main
from ebbtide.errors import UserError
from ebbtide.model.load import load_model, model_config, uninitialized_model
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import host_bytes
from ebbtide.policy.policy import Policy

CODE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config):
    model_type = "foreign"
class Model(Qwen3ForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A model with Python code beside it that leaves a mark where it runs; whoever is asked says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    made = load_model(tiny())
    path = tmp_path / "model"
    made.model.save_pretrained(path)
    made.tokenizer.save_pretrained(path)
    (path / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    yield path
    assert not (tmp_path / "mark").exists()


def change(file, **keys) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def foreign_model(folder) -> None:
    change(folder / "config.json", model_type="foreign", architectures=["Model"], **MODEL)


def foreign_tokenizer(folder) -> None:
    """With nothing by which transformers could know another class for it."""
    foreign_model(folder)
    change(folder / "tokenizer_config.json", tokenizer_class="Foreign", **TOKENIZER)


@pytest.mark.parametrize("spoil", [foreign_model, foreign_tokenizer])
def test_code_of_a_model_is_refused(tiny, folder, spoil) -> None:
    spoil(folder)
    config = tiny({"model": {"path": str(folder)}})
    for load in (load_model, model_config):
        with pytest.raises(
            UserError, match=r"`model\.path: .*model` needs its own Python code .*Ebbtide never runs a model's code"
        ):
            load(config)


def test_code_of_a_tokenizer_is_refused(tiny, folder) -> None:
    foreign_tokenizer(folder)
    config = tiny({"model.scratch.alphabet": None, "model.tokenizer": str(folder)})
    with pytest.raises(
        UserError, match=r"`model\.tokenizer: .*model` needs its own Python code .*Ebbtide never runs a model's code"
    ):
        load_model(config)


@pytest.mark.parametrize(
    "command", [["train", "quickstart", "model.scratch=null", "model.path={}", "run.folder={}-run"], ["serve", "{}"]]
)
def test_the_command_ends_with_2_and_a_sentence(folder, monkeypatch, capsys, command) -> None:
    foreign_model(folder)
    monkeypatch.setattr("sys.argv", ["ebbtide", *(part.format(folder) for part in command)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Ebbtide never runs a model's code" in " ".join(said.split())
    assert "trust_remote_code" not in said


def test_code_beside_a_class_that_transformers_has_is_left_alone(tiny, folder) -> None:
    """As on the hub, where many a model that transformers knows by now still carries the code of its first days."""
    change(folder / "config.json", **MODEL)
    change(folder / "tokenizer_config.json", **TOKENIZER)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        (folder / "code.py").read_text() + "\ndef generate(*_, **__): ...\n"
    )
    config = tiny({"model": {"path": str(folder)}, "optimizer.place": "cpu"})
    loaded = load_model(config)
    assert type(loaded.model).__module__.startswith("transformers.")
    assert type(loaded.tokenizer).__module__.startswith("transformers.")
    Policy(loaded, config).verify()
    assert uninitialized_model(config, loaded.model.dtype)[0].config.model_type == "qwen3"
    assert host_bytes(config, plan_holdings(config))
