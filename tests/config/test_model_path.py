"""Where `model.path` leads: what is mistyped is refused at once, and the hub is asked only for what could be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.config import model_path
from ebbtide.config.model import ModelConfig
from ebbtide.config.model_path import check_paths, locate
from ebbtide.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in it, in which the command is called, far from any hub."""
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    (tmp_path / "models" / "qwen3" / "config.json").write_text("{}")
    (tmp_path / "models" / "small.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path


def asking_fails(endpoint: str) -> str | None:
    raise AssertionError("the hub was asked")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("./models/qwen", "does not exist (did you mean `models/qwen3`?)"),
        ("/no/such/folder", "does not exist: name a Hugging Face folder"),
        ("~no-such-user/model", "does not exist"),
        ("models/qwen", "`models` is a folder here and has no `qwen` (did you mean `models/qwen3`?)"),
        ("models/qwen/checkpoint", "does not exist"),
        ("modles/small.gguf", "does not exist"),
        ("models/smal.gguf", "did you mean `models/small.gguf`?"),
        ("qwen3", "does not exist"),
        ("x" * 5000, "does not exist"),
        ("package:ebbtide/no.gguf", "`model.path: package:ebbtide/no.gguf` does not exist"),
    ],
)
def test_a_mistyped_path_is_never_asked_of_the_hub(
    path: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_path, "_unreachable", asking_fails)
    with pytest.raises(UserError) as caught:
        check_paths(ModelConfig(path=path))
    assert says in str(caught.value)


def test_a_tokenizer_is_looked_for_in_the_same_way(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "_unreachable", asking_fails)
    with pytest.raises(UserError, match=r"`model.tokenizer: models/qwen` does not exist"):
        check_paths(ModelConfig(path="models/qwen3", tokenizer="models/qwen"))
    check_paths(ModelConfig(path="models/qwen3", tokenizer="models/qwen3"))


def test_what_is_there_is_found(here: Path) -> None:
    assert locate("models/qwen3") == ("models/qwen3", None)
    assert locate("models/small.gguf") == ("models", "small.gguf")
    assert locate(str(here / "models" / "qwen3")) == (str(here / "models" / "qwen3"), None)


def test_a_hub_that_cannot_be_reached_is_said_after_one_question(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_answer(request, timeout):
        asked.append((request.full_url, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr(model_path, "urlopen", no_answer)
    model_path._unreachable.cache_clear()
    for _ in range(2):
        with pytest.raises(UserError, match=r"not in the cache, and the hub cannot be reached \(.*: timed out\)"):
            locate("Qwen/Qwen3-0.6B")
    model_path._unreachable.cache_clear()
    assert len(asked) == 1
    assert asked[0][1] <= 5


def test_what_the_hub_may_have_is_let_pass(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "_unreachable", lambda endpoint: None)
    assert locate("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    with pytest.raises(UserError, match="neither a folder that exists nor a hub id"):
        locate("Qwen/Qwen3 0.6B")


def test_what_is_cached_asks_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "_unreachable", asking_fails)
    stored = here / "cache" / "models--Qwen--Qwen3-0.6B"
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "snapshots" / "abc" / "config.json").write_text("{}")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HOME", str(here))
    assert locate("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)


def test_a_machine_that_is_kept_from_the_hub_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_path, "_unreachable", asking_fails)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        locate("Qwen/Qwen3-0.6B")
