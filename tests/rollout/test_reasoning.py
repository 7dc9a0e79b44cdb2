"""Reasoning is told from the answer: what is scored, and what clients of the server get."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ebbtide.algorithms.loop import train
from ebbtide.errors import UserError
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.progress import no_progress
from ebbtide.report.report import Report
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Completion
from ebbtide.rollout.reasoning import HARMONY, Parsed, ReasoningParser, reasoning_metrics
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import ask

SCORE = ScoringPool.score
MISTRAL = ["[THINK]", "[/THINK]"]
# As Qwen3's: history has no reasoning, and thinking can be switched off.
QWEN = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% set thought = m.reasoning_content if m.reasoning_content is defined else '' %}"
    "{% if thought and loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' and not loop.last else m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENS = QWEN.replace("[assistant]", "[assistant]<think>\n")  # as that of models that always think


def tokenizer_of(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, and marks: those of gpt-oss and Mistral are special tokens, as in their files."""
    tokenizer = scratch_tokenizer(None)
    special = [AddedToken(name, special=True, normalized=False) for name in (*HARMONY, *MISTRAL)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    tokenizer.chat_template = template
    return tokenizer


PLAIN = tokenizer_of()


def completion_of(text: str, tokenizer=PLAIN) -> Completion:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = tokenizer.decode(tokens, skip_special_tokens=True)
    return Completion(tokens, [0.0] * len(tokens), [0.0] * len(tokens), "stop", shown)


def parsed(format, text: str, prompt: str = "?", **how) -> Parsed:
    return ReasoningParser(format, PLAIN, "task.reasoning_parser").parse(
        PLAIN(prompt)["input_ids"], completion_of(text), **how
    )


ANALYSIS = "<|channel|>analysis<|message|>7?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("format", "prompt", "text", "reasoning", "answer", "unfinished"),
    [
        ("think", "?", "<think>7?</think>\n\n42", "7?", "42", False),
        ("think", "?<think>\n", "7?</think>42", "7?", "42", False),  # the prompt opens it
        ("think", "?", "7?</think>42", "7?", "42", False),
        ("think", "?", "I <think>7?</think>42", "I 7?", "42", False),  # nothing before its end is answer
        ("think", "?", "<think>7? 42", "7? 42", "", True),
        ("think", "?<think>\n", "7? 42", "7? 42", "", True),
        ("think", "?", "42 <think>7?", "7?", "", True),
        ("think", "?", "42", "", "42", False),
        ("think", "?<think>\n\n</think>\n\n", "42", "", "42", False),  # thinking is switched off
        ("think", "?", "<think>7?</think>4<think>2</think>", "7?", "4<think>2</think>", False),
        (["<r>", "</r>"], "?", "<r>7?</r>42", "7?", "42", False),  # marks that are no tokens
        (["<r>", "</r>"], "?<r>", "7?</r>42", "7?", "42", False),
        (MISTRAL, "?", "[THINK]7?[/THINK]42", "7?", "42", False),  # marks that the text does not show
        (MISTRAL, "?", "[THINK]7?", "7?", "", True),
        ("harmony", "?<|start|>assistant", f"{ANALYSIS}<|channel|>final<|message|>42<|return|>", "7?", "42", False),
        ("harmony", "?", f"{ANALYSIS}<|channel|>final <|constrain|>json<|message|>42", "7?", "42", False),
        ("harmony", "?", ANALYSIS, "7?", "", True),
        ("harmony", "?", f"{ANALYSIS}<|channel|>final", "7?", "", True),
        ("harmony", "?", "<|channel|>commentary to=f<|message|>42<|call|>", "42", "", True),
        ("harmony", "?<|start|>assistant<|channel|>final<|message|>", "42<|return|>", "", "42", False),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>4<|end|><|start|>assistant", "42", "", "42", False),
        ("harmony", "?", "42", "", "42", False),
        ("harmony", "?", "42<|return|>", "", "42", False),
        ("harmony", "?<|start|>assistant", "<|message|>42<|return|>", "", "42", False),
        ("harmony", "?", f"{ANALYSIS}<|message|>42<|return|>", "7?42", "", True),  # all but `final` is reasoning
    ],
)
def test_the_answer_is_what_follows_the_reasoning(format, prompt, text, reasoning, answer, unfinished) -> None:
    found = parsed(format, text, prompt)
    assert (found.reasoning, found.answer, found.is_unfinished) == (reasoning, answer, unfinished)


def test_tokens_of_reasoning_are_counted() -> None:
    assert parsed("think", "<think>7?</think>42").reasoning_tokens == 4
    assert parsed("think", "42").reasoning_tokens == 0
    assert parsed("think", "<think>7").reasoning_tokens == 2
    assert parsed(["<r>", "</r>"], "<r>7?</r>42").reasoning_tokens is None
    whole = f"{ANALYSIS}<|channel|>final<|message|>42<|return|>"
    assert parsed("harmony", whole).reasoning_tokens == len(completion_of(whole).tokens) - 3
    figures = reasoning_metrics([parsed("think", "<think>7?</think>42"), parsed("think", "<think>7")])
    assert figures == {"reasoning_unfinished": 0.5, "reasoning_tokens": 3.0}
    assert reasoning_metrics([parsed(["<r>", "</r>"], "<r>7?</r>42")]) == {"reasoning_unfinished": 0.0}
    assert reasoning_metrics([]) == {}


def test_an_answer_ends_before_a_stop_text() -> None:
    assert parsed(MISTRAL, "[THINK]7?[/THINK]42 stop", stop=["stop", "!"]).answer == "42 "


@pytest.mark.parametrize("format", ["think", "harmony", ["<r>", "</r>"]])
def test_pieces_are_split_as_the_whole_is(format) -> None:
    """Wherever a text is cut: a part of a mark is never given away."""
    parser, draw = ReasoningParser(format, PLAIN, "k"), random.Random(0)
    words = [*parser.marks, "a", "<", "<thi", "final", "</", "r>", "|>"]
    for _ in range(300):
        text = "".join(draw.choices(words, k=6))
        whole, pieces = parser.splitter(""), parser.splitter("")
        expected = whole.add(text, last=True)
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
        found = [pieces.add(text[a:b], last=b == len(text) and n == 4) for n, (a, b) in enumerate(ends)]
        assert tuple("".join(part) for part in zip(*found, strict=True)) == expected
        assert pieces.is_reasoning == whole.is_reasoning


def test_the_template_says_which_format() -> None:
    for template, marks in (
        (QWEN, ("<think>", "</think>")),
        ("[THINK]x[/THINK]", tuple(MISTRAL)),
        ("<|channel|>analysis", HARMONY),
    ):
        assert ReasoningParser("auto", tokenizer_of(template), "task.reasoning_parser").marks == marks
    with pytest.raises(UserError, match=r"`task.reasoning_parser: auto`: the model's chat template has none"):
        ReasoningParser("auto", tokenizer_of("{{ messages }}"), "task.reasoning_parser")
    with pytest.raises(UserError, match=r"no token `<\|channel\|>`"):
        ReasoningParser("harmony", scratch_tokenizer(None), "task.reasoning_parser")


# What is scored


def scored_texts(config, monkeypatch) -> tuple[list[str], dict]:
    """(what the scorers of a run of one step got, the metrics of that step)."""
    work: list[str] = []

    def recorded(self, given, progress=no_progress):
        work.extend(text for _, text in given)
        return SCORE(self, given, progress)

    monkeypatch.setattr(ScoringPool, "score", recorded)
    with Report(config, "test") as report:
        train(config, report)
    folder = Path(config.run.folder)
    return work, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("environment", [False, True])
def test_scorers_get_the_answer(tiny, tmp_path, monkeypatch, environment) -> None:
    """Here reasoning begins with an 8 and ends with a 9; with an environment, that of the last turn."""
    changes = {"run.folder": str(tmp_path / "run"), "train.steps": 1, "rollout.max_new_tokens": 12}
    changes |= {"task.environment": {"object": "rewardless_environment:Tools"}} if environment else {}
    plain, metrics = scored_texts(tiny({**changes, "run.folder": str(tmp_path / "plain")}), monkeypatch)
    assert "reasoning_unfinished" not in metrics
    found, metrics = scored_texts(tiny({**changes, "task.reasoning_parser": ["8", "9"]}), monkeypatch)
    ends = [text.partition("9")[2] if "9" in text else "" if "8" in text else text for text in plain]
    assert found == ends
    assert found != plain
    unfinished = ["9" not in text and "8" in text for text in plain]
    assert metrics["reasoning_unfinished"] == sum(unfinished) / len(plain) > 0


# Where the template is rendered


def test_arguments_reach_the_template() -> None:
    tokenizer = tokenizer_of(QWEN)
    encoder = Encoder(tokenizer, templated=True, arguments={"enable_thinking": False})
    assert encoder.chat(ask("hi")).text == "[user]hi<|end|>[assistant]<think>\n\n</think>\n\n"
    assert encoder.with_tools([]).chat(ask("hi")).text.endswith("</think>\n\n")
    assert Encoder(tokenizer, templated=True).chat(ask("hi")).text == "[user]hi<|end|>[assistant]"
    other = encoder.with_arguments({"enable_thinking": True})
    assert other.chat(ask("hi")).text == "[user]hi<|end|>[assistant]"


def test_marks_of_reasoning_in_data_are_tokens_though_the_template_writes_them() -> None:
    """In a prompt that ends with one they would otherwise count as marks of turns, and be text in examples."""
    tokenizer = tokenizer_of(OPENS)
    encoder = Encoder(tokenizer, templated=True)
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "<|end|>"])
    chat = [*ask("hi"), {"role": "assistant", "content": "<think>\nso</think>yes <|end|>"}]
    tokens = encoder.tokenize([encoder.prepare_chat(chat, generation_prompt=False)])[0]
    assert tokens.count(think) == 1
    assert tokens.count(end) == 2  # of the template: the end of a turn in data is text
    assert not encoder.is_control(think)


def test_reasoning_of_messages_reaches_the_template() -> None:
    encoder = Encoder(tokenizer_of(QWEN), templated=True)
    chat = [*ask("hi"), {"role": "assistant", "content": "yes", "reasoning_content": "so <|end|>"}]
    prepared = encoder.prepare_chat(chat, generation_prompt=False)
    assert prepared.text == "[user]hi<|end|>[assistant]<think>\nso <|end|>\n</think>\n\nyes<|end|>"
    end = encoder._tokenizer.convert_tokens_to_ids("<|end|>")
    assert encoder.tokenize([prepared])[0].count(end) == 2


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_turns_are_the_templates_with_its_arguments(arguments) -> None:
    """Where thinking is switched off, the empty one of the prompt is not part of history, so the conversation forks."""
    tokenizer = tokenizer_of(QWEN)
    encoder = Encoder(tokenizer, templated=True, arguments=arguments)
    turns = ChatTurns(encoder)
    conversation, opened = turns.open(ask("hi"))
    turn = completion_of("yes", tokenizer)
    continued = turns.answer(conversation, turn, ask("more"))
    assert continued.forks == bool(arguments)
    whole = encoder.chat(conversation.messages).tokens
    assert (continued.tokens if continued.forks else [*opened.tokens, *turn.tokens, *continued.tokens]) == whole
