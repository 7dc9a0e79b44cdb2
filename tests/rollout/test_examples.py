"""Examples of files as tokens, and exactly those of them that carry loss."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebbtide.config.data import ExamplesConfig, PairsConfig
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.policy.datum import Datum
from ebbtide.progress import no_progress
from ebbtide.rollout.examples import ExampleEncoder, data_digest, encode_examples, encode_pairs, read_example_rows
from example_runs import config_of, write_rows

START, END, STOP = "<|start|>", "<|end|>", "<|stop|>"
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# As Qwen3's and DeepSeek's: thinking stays in the last turn alone.
FORGETFUL = (
    "{% for m in messages %}{% set text = m.content if loop.last else m.content.split('</think>')[-1] %}"
    "{{ '<|start|>' + m.role + '\n' + text + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
PREFACED = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")  # the prompt has what the turn has not


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and three control tokens, of which the first two mark turns."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (START, END, STOP)])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, eos_token=STOP)


@pytest.fixture(scope="module")
def bytewise():
    config = config_of("sft", {"data.train": "x", "data.max_tokens": 60, "model.scratch.alphabet": None})
    return config, load_model(config)


@pytest.fixture
def encoded(bytewise):
    """encoded({"messages": [...]}, template=CHATML): each datum as (text, what carries loss of it)."""
    config, loaded = bytewise

    def encode(row, template=CHATML, limit=1000, overlong="error", **settings):
        tokenizer = tokenizer_of(template)
        loaded.model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(name) for name in (END, STOP)]
        loaded.model.resize_token_embeddings(len(tokenizer))
        encoder = ExampleEncoder(LoadedModel(loaded.model, tokenizer, ""), config, limit, overlong)
        if "chosen" in row:
            found = encode_pairs([(row, "data, line 1,")], encoder, PairsConfig(train="x", **settings), no_progress)
        else:
            data = ExamplesConfig(train="x", **settings)
            found = encode_examples([(row, "data, line 1,")], encoder, data, no_progress)
        texts = []
        for datum in (datum for example in found for datum in example):
            pieces = [tokenizer.decode([token]) for token in datum.tokens]
            marked = ["".join(pieces[i] if i in datum.targets else "." * len(pieces[i]) for i in range(len(pieces)))]
            texts.append(("".join(pieces), marked[0].strip(".")))
        return texts

    return encode


def chat(*texts: str, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def parts(marked: str) -> list[str]:
    """What carries loss, run by run."""
    return [part for part in marked.split("..") if part.strip(".")]


def test_reasoning_of_a_message_is_rendered_and_carries_loss(encoded) -> None:
    reasons = CHATML.replace(
        "m.content +", "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content +"
    )
    chat = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5", "reasoning_content": "so"}]
    assert encoded({"messages": chat}, reasons) == [
        ("<|start|>user\n2+3?<|end|>\n<|start|>assistant\n<think>so</think>5<|end|>", "<think>so</think>5<|end|>")
    ]


def test_assistant_turns_carry_loss_up_to_and_with_their_end(encoded) -> None:
    ((text, marked),) = encoded({"messages": chat("a?", "b!", "c?", "d!")})
    turns = ["<|start|>user\na?<|end|>\n<|start|>assistant\nb!<|end|>\n<|start|>user\nc?<|end|>\n<|start|>assistant\n"]
    assert text == turns[0] + "d!<|end|>"  # not the line break that the template writes behind it
    assert parts(marked) == ["b!<|end|>", "d!<|end|>"]
    hidden = len("<|start|>user\na?<|end|>\n<|start|>assistant\n")
    assert marked == "b!<|end|>" + "." * (len(turns[0]) - hidden - len("b!<|end|>")) + "d!<|end|>"


def test_what_follows_the_last_assistant_turn_is_left_away_unless_all_carries_loss(encoded) -> None:
    messages = chat("a?", "b!", "thanks")
    ((text, _),) = encoded({"messages": messages})
    assert text.endswith("b!<|end|>")
    ((text, marked),) = encoded({"messages": messages}, loss_on="all")
    assert text.endswith("thanks<|end|>\n")
    assert marked == text.removeprefix(START)  # nothing predicts the first token


def test_all_tokens_of_a_conversation_carry_loss_once(encoded) -> None:
    """One datum, also where the template rewrites turns: else what comes before would count several times."""
    for template in (CHATML, FORGETFUL):
        ((text, marked),) = encoded({"messages": chat("a?", "b!", "c?", "d!")}, template, loss_on="all")
        assert text == text.removesuffix("\n")
        assert marked == text.removeprefix(START)


def test_a_template_that_rewrites_earlier_turns_gives_a_datum_for_each_turn(encoded) -> None:
    row = {"messages": chat("a?", "<think>x</think>b!", "c?", "<think>y</think>d!")}
    (first, one), (second, other) = encoded(row, FORGETFUL)
    assert one == "<think>x</think>b!<|end|>"
    assert "<think>x" in first
    assert other == "<think>y</think>d!<|end|>"
    assert "x" not in second
    assert second.count("b!<|end|>") == 1  # as context
    assert len(encoded({"messages": chat("a?", "b!", "c?", "d!")}, FORGETFUL)) == 1  # it rewrites nothing here


def test_a_template_that_refuses_is_named_with_the_line(encoded) -> None:
    messages = [{"role": "system", "content": "s"}, *chat("a", "b")]
    with pytest.raises(UserError, match=r"chat template refuses data, line 1: no system message"):
        encoded({"messages": messages}, REFUSING)
    with pytest.raises(UserError, match=r"data, line 1, has an assistant turn \(message 1\).*chat_template: false"):
        encoded({"messages": chat("a", "b")}, PREFACED)


def test_a_conversation_without_a_template_is_its_texts(encoded) -> None:
    ((text, marked),) = encoded({"messages": chat("a?", "b!", "c?", "d!")}, None)
    assert text == "a?b!<|end|>c?d!<|end|>"
    assert marked == "b!<|end|>..d!<|end|>"
    ((text, marked),) = encoded({"messages": chat("hello", "a?", first="assistant")}, None)
    assert (text, marked) == ("hello<|end|>", "ello<|end|>")  # the first token has nothing before it
    ((text, marked),) = encoded({"messages": chat("a?", "b!", "c?")}, None, loss_on="all")
    assert (text, marked) == ("a?b!<|end|>c?", "?b!<|end|>c?")


def test_prompts_with_completions_as_texts_and_as_messages(encoded) -> None:
    assert encoded({"prompt": "a?", "completion": "b!"}) == [("a?b!<|end|>", "b!<|end|>")]
    assert encoded({"prompt": "a?", "completion": "b!"}, loss_on="all") == [("a?b!<|end|>", "?b!<|end|>")]
    assert encoded({"prompt": "", "completion": "b!"}) == [("b!<|end|>", "!<|end|>")]
    conversation = encoded({"messages": chat("a?", "b!")})
    for prompt, completion in (
        (chat("a?"), chat("b!", first="assistant")),
        (chat("a?"), "b!"),
        ("a?", chat("", "b!")[1:]),
    ):
        assert encoded({"prompt": prompt, "completion": completion}) == conversation


@pytest.mark.parametrize("template", [CHATML, None])
def test_assistant_turns_of_a_prompt_carry_no_loss(encoded, template) -> None:
    row = {"prompt": chat("a?", "b!", "c?"), "completion": chat("d!", first="assistant")}
    ((text, marked),) = encoded(row, template)
    assert "b!" in text
    assert marked == "d!<|end|>"


def test_dotted_fields_of_examples_and_pairs(encoded) -> None:
    row = {"data": {"q": "2+2=", "a": "4", "b": "5"}}
    one = encoded(row, template=None, prompt_field="data.q", completion_field="data.a")
    assert one == [("2+2=4<|end|>", "4<|end|>")]
    names = {"prompt_field": "data.q", "chosen_field": "data.a", "rejected_field": "data.b"}
    pair = encoded({"chosen": None, **row}, template=None, **names)
    assert [marked for _, marked in pair] == ["4<|end|>", "5<|end|>"]


def test_texts_and_which_field_decides(encoded) -> None:
    assert encoded({"text": "abc"}) == [("abc<|end|>", "bc<|end|>")]
    row = {"text": "abc", "prompt": "a?", "completion": "b!", "messages": None}
    assert encoded(row) == [("a?b!<|end|>", "b!<|end|>")]
    assert encoded({**row, "completion": None}) == [("abc<|end|>", "bc<|end|>")]  # as Parquet has it
    assert encoded({"question": "a?", "answer": "b!"}, prompt_field="question", completion_field="answer") == [
        ("a?b!<|end|>", "b!<|end|>")
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("a<|end|>", "b<|end|>!<|start|>")},
        {"prompt": "a<|end|>", "completion": "b<|end|>!<|start|>"},
        {"text": "a<|end|>b<|end|>!<|start|>"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_the_texts_of_control_tokens_in_data_stay_texts(bytewise, encoded, row) -> None:
    tokenizer = tokenizer_of(CHATML)
    config, loaded = bytewise
    encoded({"text": "x"})
    encoder = ExampleEncoder(LoadedModel(loaded.model, tokenizer, ""), config, 1000, "error")
    (((datum),),) = encode_examples([(row, "line 1,")], encoder, ExamplesConfig(train="x"), no_progress)
    ends = [place for place, token in enumerate(datum.tokens) if token == tokenizer.convert_tokens_to_ids(END)]
    assert len(ends) == (2 if "messages" in row else 1)  # only those that the template writes, or we
    assert ends[-1] == len(datum.tokens) - 1
    text = tokenizer.decode([datum.tokens[target] for target in datum.targets][:-1])
    assert text.endswith("b<|end|>!<|start|>")


def test_overlong_examples_stop_the_run_or_are_dropped_or_cut(encoded) -> None:
    row = {"prompt": "a?", "completion": "bcdef"}
    assert encoded(row, limit=8) == [("a?bcdef<|end|>", "bcdef<|end|>")]
    with pytest.raises(UserError, match=r"data, line 1, has 8 tokens, more than `data.max_tokens` = 7"):
        encoded(row, limit=7)
    assert encoded(row, limit=7, overlong="truncate") == [("a?bcdef", "bcdef")]
    for how, limit in (("drop", 7), ("truncate", 2)):  # of which nothing would carry loss
        with pytest.raises(UserError, match=r"none of 1 examples is left.*`data.max_tokens`"):
            encoded(row, limit=limit, overlong=how)
    trailing = {"messages": chat("a", "b", "c" * 99)}
    assert encoded(trailing, None, limit=4) == [("ab<|end|>", "b<|end|>")]  # which is not counted


BAD = {
    "not JSON": ('{"text": "a"}\nnonsense\n', r"line 2, is not JSON"),
    "a list": ("[1]\n", r"line 1, must be a JSON object"),
    "other fields": ('{"question": "a"}\n', r"line 1, has neither `messages`, nor .* its fields are: question"),
    "half a row": ('{"prompt": "a"}\n', r"line 1, has neither .* its fields are: prompt"),
    "numbers": ('{"text": 5}\n', r"line 1, field `text`, must be a text"),
    "messages": ('{"messages": [{"role": "user"}]}\n', r"line 1, field `messages`, must be a text or a list"),
    "no messages": ('{"messages": []}\n', r"line 1, field `messages`, must be"),
    "no answer": ('{"messages": [{"role": "user", "content": "1"}]}\n', r"line 1, has no message of the role"),
    "completion": ('{"prompt": "1", "completion": {"a": 1}}\n', r"line 1, field `completion`, must be"),
    "half a character": ('{"text": "1\\ud800"}\n', r"line 1, field `text`, .*surrogate"),
    "characters": ('{"text": "12x"}\n', r"line 1, has characters that `model.scratch.alphabet` lacks"),
    "nothing": ("", r"bad.jsonl is empty"),
    "empty texts": ('{"text": ""}\n', r"none of 1 examples is left"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named_by_their_line_and_key(tmp_path, case) -> None:
    text, wanted = BAD[case]
    (tmp_path / "bad.jsonl").write_text(text)
    config = config_of("sft", {"data.train": str(tmp_path / "bad.jsonl"), "data.max_tokens": 32})
    encoder = ExampleEncoder(load_model(config), config, 32, "drop")

    def read() -> None:
        encode_examples(read_example_rows(config.data, evaluated=False).train, encoder, config.data, no_progress)

    with pytest.raises(UserError, match=wanted):
        read()


def test_held_out_rows_are_the_last_ones_or_a_file_of_their_own(tmp_path) -> None:
    rows = [{"text": str(number)} for number in range(9)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    empty, more = write_rows(tmp_path / "empty.jsonl", []), write_rows(tmp_path / "more.jsonl", rows[:2])

    def read(evaluated=True, **settings):
        found = read_example_rows(ExamplesConfig(**{"train": file, **settings}), evaluated=evaluated)
        return [int(row["text"]) for row, _ in found.train], [int(row["text"]) for row, _ in found.held_out]

    assert read(held_out_rows=2) == ([*range(7)], [7, 8])
    assert read(held_out_rows=2, evaluated=False) == ([*range(9)], [])
    assert read(held_out=more) == ([*range(9)], [0, 1])
    with pytest.raises(UserError, match=r"`data.held_out_rows: 9` sets all 9 rows"):
        read(held_out_rows=9)
    with pytest.raises(UserError, match=r"raise `data.held_out_rows`"):
        read(held_out_rows=0)
    for settings in ({"held_out": empty}, {"train": empty}):
        with pytest.raises(UserError, match=r"empty.jsonl is empty"):
            read(**settings)
    with pytest.raises(UserError, match=r"does not exist .*`data`"):
        read(train="nowhere.jsonl")


def test_parquet_files_are_read_as_jsonl(tmp_path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": chat("1", "2"), "text": None}, {"messages": None, "text": "345"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    file = write_rows(tmp_path / "a.jsonl", rows)
    config = config_of("sft", {"data.train": file, "data.max_tokens": 32})
    encoder = ExampleEncoder(load_model(config), config, 32, "error")
    found = [
        encode_examples(
            read_example_rows(ExamplesConfig(train=path), evaluated=False).train, encoder, config.data, no_progress
        )
        for path in (file, str(tmp_path / "a.parquet"))
    ]
    assert found[0] == found[1]


# Pairs

ASKED, BETTER, WORSE = chat("a?", "b!", "c?"), chat("d!", first="assistant"), chat("e!", first="assistant")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": BETTER, "rejected": WORSE},
        {"prompt": ASKED, "chosen": "d!", "rejected": "e!"},
        {"chosen": ASKED + BETTER, "rejected": ASKED + WORSE},
        {"prompt": "a?", "chosen": ASKED + BETTER, "rejected": ASKED + WORSE},  # as UltraFeedback has it
    ],
    ids=["messages", "texts after messages", "without a prompt", "the prompt once more"],
)
@pytest.mark.parametrize("template", [CHATML, FORGETFUL, None], ids=["chatml", "forgetful", "joined"])
def test_pairs_carry_loss_where_their_sides_differ(encoded, row, template) -> None:
    (chosen, better), (rejected, worse) = encoded(row, template)
    assert (better, worse) == ("d!<|end|>", "e!<|end|>")
    assert chosen.removesuffix(better) == rejected.removesuffix(worse)
    assert chosen.count("a?") == chosen.count("b!") == 1


def test_pairs_of_texts(encoded) -> None:
    wanted = [("a? b!<|end|>", " b!<|end|>"), ("a? c<|end|>", " c<|end|>")]
    assert encoded({"prompt": "a?", "chosen": " b!", "rejected": " c"}) == wanted
    assert encoded({"chosen": "a? b!", "rejected": "a? c"}) == wanted
    words = encoded({"chosen": "so it is", "rejected": "so it isn't"})  # no word is cut in two
    assert [marked for _, marked in words] == [" is<|end|>", " isn't<|end|>"]


def test_a_prompt_and_one_message_are_a_pair_of_chats(encoded) -> None:
    found = encoded({"prompt": "a?", "chosen": BETTER, "rejected": WORSE})
    assert [text for text, _ in found] == [
        f"<|start|>user\na?<|end|>\n<|start|>assistant\n{answer}<|end|>" for answer in ("d!", "e!")
    ]


def test_a_pair_of_equal_sides_keeps_a_turn_of_its_own(encoded) -> None:
    both = ASKED + BETTER
    assert [marked for _, marked in encoded({"chosen": both, "rejected": both})] == ["d!<|end|>"] * 2


def test_bad_pairs_are_named(encoded) -> None:
    with pytest.raises(UserError, match=r"line 1, has no field `rejected` \(`data.rejected_field`\)"):
        encoded({"chosen": "a"})
    with pytest.raises(UserError, match=r"line 1, has a text and a list of messages as a pair"):
        encoded({"chosen": "a", "rejected": chat("a", "b")})
    with pytest.raises(UserError, match=r"all 1 pairs have more than"):
        encoded({"prompt": "a", "chosen": "b", "rejected": "c" * 99}, limit=20, overlong="drop")


def test_the_texts_of_many_rows_are_tokenized_at_once(bytewise, encoded, monkeypatch) -> None:
    tokenizer = tokenizer_of(CHATML)
    config, loaded = bytewise
    encoded({"text": "x"})
    calls: list[int] = []
    call = type(tokenizer).__call__

    def counted(self, texts, **options):
        calls.append(len(texts))
        assert isinstance(texts, list)
        return call(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    encoder = ExampleEncoder(LoadedModel(loaded.model, tokenizer, ""), config, 1000, "error")
    rows = [({"messages": chat("a", f"b{n}", "c", f"d{n}")}, "x,") for n in range(20)]
    rows += [({"prompt": f"a{n}", "completion": f"b{n}"}, "x,") for n in range(20)]
    together = encode_examples(rows, encoder, ExamplesConfig(train="x"), no_progress)
    assert sorted(calls) == [20, 100]  # prompts, which have what a text begins with; completions and chats
    alone = [encode_examples([row], encoder, ExamplesConfig(train="x"), no_progress)[0] for row in rows]
    assert together == alone


def test_a_digest_tells_tokens_from_targets_and_examples() -> None:
    data = [[Datum([1, 2, 3], [1, 2])], [Datum([1, 2, 3], [2])], [Datum([1, 2], [1]), Datum([3, 4], [1])]]
    data += [[Datum([1, 2, 3, 4], [1])], [Datum([1, 2, 3], [1])]]
    assert len({data_digest([one]) for one in data}) == len(data)
    assert data_digest([data[0]]) == data_digest([[Datum([1, 2, 3], range(1, 3))]])
