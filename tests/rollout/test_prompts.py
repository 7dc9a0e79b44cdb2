"""Prompts: the chat template, and the errors before the first step."""

import pytest

from ebbtide.errors import UserError
from ebbtide.model.tokenizer import scratch_tokenizer
from ebbtide.rollout.prompts import encode_prompts, prompts_digest
from ebbtide.tasks.task import Problem, ask

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{%"
    " endif %}"
)


def quiet(done: int, of: int) -> None: ...


def test_bytes_read_any_text() -> None:
    tokenizer = scratch_tokenizer(None)
    for text in ("plain", "é好\n\t", "", " two  spaces "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_alphabets_are_one_token_a_character() -> None:
    tokenizer = scratch_tokenizer("abc\n ")
    ids = tokenizer("a b\nc")["input_ids"]
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a b\nc"
    with pytest.raises(UserError, match="and each only once"):
        scratch_tokenizer("aa")


@pytest.mark.parametrize("alphabet", [None, "0123456789="])
def test_a_model_from_scratch_can_sample_nothing_that_its_scorer_does_not_see_but_the_end(alphabet) -> None:
    tokenizer = scratch_tokenizer(alphabet)
    unseen = [token for token in range(len(tokenizer)) if not tokenizer.decode([token], skip_special_tokens=True)]
    assert unseen == [tokenizer.eos_token_id]


def test_template_or_plain_text(tiny) -> None:
    tokenizer = scratch_tokenizer(None)
    problem = Problem([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    changes = {"model.scratch.alphabet": None, "rollout.max_prompt_tokens": 50}
    (plain,) = encode_prompts([problem], tokenizer, len(tokenizer), tiny(changes), quiet)
    assert plain.text == "su"
    tokenizer.chat_template = TEMPLATE
    (chat,) = encode_prompts([problem], tokenizer, len(tokenizer), tiny(changes), quiet)
    assert chat.text == "<system>s<user>u<assistant>"
    assert tokenizer.decode(chat.tokens) == chat.text
    (off,) = encode_prompts(
        [problem], tokenizer, len(tokenizer), tiny({**changes, "model.chat_template": False}), quiet
    )
    assert off.text == "su"


def test_a_template_that_takes_no_system_message(tiny) -> None:
    tokenizer = scratch_tokenizer(None)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    problem = Problem([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    with pytest.raises(UserError, match=r"refuses problem 0 .*system, user.*no system role.*`task.system`"):
        encode_prompts([problem], tokenizer, len(tokenizer), tiny({"model.scratch.alphabet": None}), quiet)


def test_overlong_prompts(tiny) -> None:
    tokenizer = scratch_tokenizer("0123456789=")
    problems = [Problem(ask("1")), Problem(ask("123456789"))]
    with pytest.raises(UserError, match=r"problem 1 has a prompt of 9 tokens.*`rollout.max_prompt_tokens` = 8"):
        encode_prompts(problems, tokenizer, len(tokenizer), tiny(), quiet)
    assert [
        prompt.text
        for prompt in encode_prompts(
            problems, tokenizer, len(tokenizer), tiny({"task.overlong_prompts": "drop"}), quiet
        )
    ] == ["1"]
    with pytest.raises(UserError, match="all 1 prompts"):
        encode_prompts(problems[1:], tokenizer, len(tokenizer), tiny({"task.overlong_prompts": "drop"}), quiet)


def test_unknown_characters_and_empty_prompts(tiny) -> None:
    tokenizer = scratch_tokenizer("0123456789=")
    with pytest.raises(UserError, match="'xy'"):
        encode_prompts([Problem(ask("1x2y"))], tokenizer, len(tokenizer), tiny(), quiet)
    with pytest.raises(UserError, match="empty prompt"):
        encode_prompts([Problem(ask(""))], tokenizer, len(tokenizer), tiny(), quiet)


def test_a_token_that_the_embedding_has_no_row_for_is_named(tiny) -> None:
    tokenizer = scratch_tokenizer("0123456789=")
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    problems = [Problem(ask("12=")), Problem(ask("1<image>="))]
    assert len(encode_prompts(problems[:1], tokenizer, rows, tiny(), quiet)) == 1
    with pytest.raises(
        UserError, match=rf"problem 1 has the token '<image>'.*begins '1<image>='.*number {rows}, .*only {rows} rows"
    ):
        encode_prompts(problems, tokenizer, rows, tiny(), quiet)


def test_a_template_that_says_the_date_says_that_of_the_run(tiny) -> None:
    tokenizer = scratch_tokenizer(None)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: " + TEMPLATE
    config = tiny({"model.chat_date": "2024-02-29", "model.scratch.alphabet": None, "rollout.max_prompt_tokens": 58})
    (prompt,) = encode_prompts([Problem(ask("u"))], tokenizer, len(tokenizer), config, quiet)
    assert prompt.text == "29 Feb 2024: <user>u<assistant>"


def test_a_template_that_fails_is_one_that_refuses(tiny) -> None:
    tokenizer = scratch_tokenizer(None)
    tokenizer.chat_template = "{{ 1 + messages[0].content }}"
    with pytest.raises(UserError, match=r"the model's chat template refuses problem 0 .*TypeError"):
        encode_prompts([Problem(ask("u"))], tokenizer, len(tokenizer), tiny(), quiet)


def test_a_digest_is_of_prompts_and_answers_in_their_order(tiny) -> None:
    tokenizer, config = scratch_tokenizer("0123456789="), tiny()

    def of(*problems: tuple[str, object]) -> str:
        return prompts_digest(
            encode_prompts(
                [Problem(ask(text), answer) for text, answer in problems], tokenizer, len(tokenizer), config, quiet
            )
        )

    found = {of(("1=", 1), ("2=", 2)), of(("2=", 2), ("1=", 1)), of(("1=", 1), ("2=", 3)), of(("1=", 1))}
    assert len(found) == 4
    assert of(("1=", object())) == of(("1=", object()))
