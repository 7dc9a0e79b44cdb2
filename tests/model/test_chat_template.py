"""What a chat template says of itself: which arguments it uses, and with which token it ends a turn."""

import inspect
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ebbtide.algorithms.loop import train
from ebbtide.checkpoint.export import export
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.model import TEMPLATE_ARGUMENTS, ModelConfig
from ebbtide.config.serve import ServeConfig
from ebbtide.launch.serve import load_served
from ebbtide.model.chat_template import turn_end, unused_arguments_warning
from ebbtide.model.load import load_model
from ebbtide.report.report import Report
from ebbtide.rollout.examples import ExampleEncoder

SHORT = {"train.steps": 1, "rollout.max_prompt_tokens": 50}
OVER, START, END, RETURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|return|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As that of gpt-oss: the last turn ends otherwise than those before it.
RETURNS = CHATML.replace(
    "'<|im_end|>\n'", "('<|return|>' if loop.last and not add_generation_prompt else '<|im_end|>\n')"
)


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and control tokens: the end of a turn has the smallest id."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (END, START, RETURN, OVER)])
    core.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, eos_token=OVER)


def train_run(config: GrpoConfig) -> None:
    with Report(config, "test") as report:
        train(config, report)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, END),
        (RETURNS, RETURN),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),  # it writes nothing after a turn
        ("{% for m in messages %}{{ m.content + ' ### ' }}{% endfor %}", None),  # no token of its own
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_template_says_how_a_turn_ends(template, end) -> None:
    tokenizer = tokenizer_of(template)
    assert tokenizer.decode(turn_end(tokenizer, ModelConfig(path="x")) or []) == (end or "")
    assert turn_end(tokenizer, ModelConfig(path="x", chat_template=False)) is None


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A base model as many are: its files name the end of a text alone, and its template ends turns otherwise."""
    tokenizer = tokenizer_of(CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made = load_model(tiny({"model.scratch.alphabet": None, "model.tokenizer": str(tmp_path / "tokenizer")}))
    made.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return tmp_path / "model"


def test_a_turn_ends_where_no_file_says_so(tiny, folder, tmp_path) -> None:
    """When it is loaded, trained and resumed, served, and in what is exported, which other tools read."""
    tokenizer = tokenizer_of(CHATML)
    over, end = (tokenizer.convert_tokens_to_ids(name) for name in (OVER, END))
    config = tiny({"model": {"path": str(folder)}})
    assert load_model(config).end_tokens == [over, end]  # the end of a text first: plain texts get that one
    assert load_model(tiny({"model": {"path": str(folder), "chat_template": False}})).end_tokens == [over]

    run = tmp_path / "run"
    model = {"path": str(folder), "chat_template_kwargs": {"enable_thinking": False}}
    train_run(tiny({**SHORT, "model": model, "run.folder": str(run)}))
    served, settings = load_served(str(run), ServeConfig(device="cpu"), lambda text: None)
    assert served.end_tokens == [over, end]
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    export(run, tmp_path / "exported", say=lambda text: None)
    assert GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id == [over, end]
    assert load_model(tiny({"model": {"path": str(tmp_path / "exported")}})).end_tokens == [end, over]


def test_examples_end_with_the_turn(tiny, folder) -> None:
    """What the template writes after the end of a turn, here a line break, carries no loss."""
    loaded = load_model(tiny({"model": {"path": str(folder)}}))
    encoder = ExampleEncoder(loaded, tiny({"model": {"path": str(folder)}}), 100, "error")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (((datum,),)) = encoder.encode([encoder.conversation(chat, "row")])
    assert loaded.tokenizer.decode([datum.tokens[place] for place in datum.targets]) == "b<|im_end|>"


def test_arguments_that_are_set_here_are_refused(tiny) -> None:
    """All of those that the function has which renders templates, but for documents."""
    known = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert known.keys() - {"self", "kwargs", "documents"} <= TEMPLATE_ARGUMENTS
    for name in sorted(TEMPLATE_ARGUMENTS):
        with pytest.raises(ValueError, match=f"`{name}` is set by Ebbtide itself"):
            tiny({"model.chat_template_kwargs": {name: 1}})
    with pytest.raises(ValueError, match="`chat_template: false` switches it off"):
        tiny({"model.chat_template_kwargs": {"a": 1}, "model.chat_template": False})


def test_arguments_that_no_template_uses_are_warned_of() -> None:
    used = {"enable_thinking": False}
    assert unused_arguments_warning(tokenizer_of(CHATML), used) is None
    assert unused_arguments_warning(tokenizer_of(CHATML), {}) is None
    warning = unused_arguments_warning(tokenizer_of(CHATML), {**used, "enable_thinkng": False})
    assert warning is not None
    assert "does not use `enable_thinkng` of `model.chat_template_kwargs`" in warning
    assert "it uses: enable_thinking" in warning
    assert "no chat template" in str(unused_arguments_warning(tokenizer_of(None), used))
    assert unused_arguments_warning(tokenizer_of("{% if %}"), used) is None  # it cannot be read


def test_a_run_warns_once_of_a_misspelt_argument(tiny, folder, tmp_path, capsys) -> None:
    model = {"path": str(folder), "chat_template_kwargs": {"enable_thinkng": False}}
    train_run(tiny({**SHORT, "model": model, "run.folder": str(tmp_path / "run")}))
    assert "".join(capsys.readouterr()).count("`enable_thinkng`") == 1
