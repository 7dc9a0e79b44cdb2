"""Episodes are exact in their tokens: a datum has what was sampled and appended, in the order of the policy's context;
what carries loss is what was sampled; and the trainer's log-probs of it are the sampler's."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.config.environment import EnvironmentConfig
from ebbtide.policy.datum import Datum
from ebbtide.rollout import episode_runner, turn_sessions
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Completion, SamplingParams
from ebbtide.rollout.episode_runner import EpisodeRunner
from ebbtide.rollout.episodes import Branch, episode_data
from ebbtide.tasks.environment import Environment
from ebbtide.tasks.task import Problem, ask
from ebbtide.worker import Worker

KEEPS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMS = KEEPS.replace("m.content", "(m.content | trim)").replace("<end>\n", "<end>")
NO_TOOL_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + KEEPS
)
# Thinking is dropped once it is history: here, everything before the last full stop.
DROPS = KEEPS.replace("m.content", "(m.content if m.role != 'assistant' else m.content[-2:])")
TEMPLATES = {"keeps": KEEPS, "trims": TRIMS, "no tool role": NO_TOOL_ROLE, "drops": DROPS, "none": None}
LIMIT = 96


class Talks:
    """An environment that says something random for a while."""

    def __init__(self, chance: random.Random, texts: list[str]) -> None:
        self._chance, self._texts = chance, texts

    def reset(self, seed: int) -> str:
        self._left = 1 + seed % 4
        return f"begin {seed % 3}."

    def step(self, text: str):
        self._left -= 1
        role = self._chance.choice(["user", "tool"])
        said = [{"role": role, "content": self._chance.choice(self._texts)}]
        return {"observations": said, "reward": 0.25, "done": self._left == 0}


class Here:
    """The pool of environments, in this process: answers come in any order, some of them later."""

    def __init__(self, make, chance: random.Random) -> None:
        self._make, self._chance, self._asked, self._number = make, chance, [], 0

    def open(self):
        self._number += 1
        here = type("Process", (), {"number": self._number, "seconds": 0.0, "environment": None})()
        here.environment = Environment(self._make())
        return here

    def ask(self, process, verb, *arguments) -> None:
        self._asked.append((process, verb, arguments))

    @property
    def is_awaiting(self) -> bool:
        return bool(self._asked)

    def answers(self, wait: float):
        self._chance.shuffle(self._asked)
        count = self._chance.randint(1 if wait else 0, max(1, len(self._asked))) if self._asked else 0
        due, self._asked = self._asked[:count], self._asked[count:]
        return [(process, getattr(process.environment, verb)(*arguments)) for process, verb, arguments in due]

    def close(self, process, *, hard: bool) -> None:
        self._asked = [one for one in self._asked if one[0] is not process]


@pytest.fixture(scope="module")
def worker():
    from conftest import TINY, merged
    from ebbtide.config.algorithms.grpo import GrpoConfig

    changes = {
        "checkpoint": None,
        "model.scratch.alphabet": None,
        "model.scratch.context": 256,
        "train.microbatch_tokens": 512,
        "rollout.max_prompt_tokens": 64,
        "rollout.max_new_tokens": LIMIT,
    }
    with Worker(GrpoConfig.model_validate(merged(TINY, changes))) as made:
        yield made


def runner_of(worker, template, chance, texts, **limits) -> EpisodeRunner:
    worker.policy.tokenizer.chat_template = template
    environment = EnvironmentConfig(object="a:b", **{"max_turn_tokens": 8, "max_concurrent": 8, **limits})
    turns = ChatTurns(Encoder(worker.policy.tokenizer, templated=template is not None))
    rows = worker.policy.vocabulary_rows
    return EpisodeRunner(
        environment,
        worker.config.rollout,
        Here(lambda: Talks(chance, texts), chance),
        turns,
        tool_format="json",
        rows=rows,
        lockstep=chance.random() < 0.5,
    )


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.text(max_size=8) | st.sampled_from(["<end>", "[assistant]", "\n"]), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_datum_has_what_was_sampled_and_appended(worker, template, texts, chance) -> None:
    runner = runner_of(worker, TEMPLATES[template], chance, texts)
    contexts: dict[turn_sessions.Sequenced, list[int]] = {}
    sampled: list[tuple[list[int], Completion]] = []

    class Recorded:
        """A session whose every sequence is written down."""

        def __init__(self, session) -> None:
            self._session = session

        def __getattr__(self, name):
            return getattr(self._session, name)

        def begin(self, prompt, seeds, most):
            begun = self._session.begin(prompt, seeds, most)
            contexts.update({one: list(prompt) for one in begun})
            return begun

        def append(self, sequence, tokens, seed, most) -> None:
            contexts[sequence] += tokens
            self._session.append(sequence, tokens, seed, most)

        def step(self):
            over = self._session.step()
            for sequence, completion in over:
                sampled.append((list(contexts[sequence]), completion))
                contexts[sequence] += completion.tokens
            return over

    original = episode_runner._Step.__init__

    def recording(self, runner, session, *rest) -> None:
        original(self, runner, Recorded(session), *rest)

    problems = [Problem(ask("hello "), metadata={"seed": seed}) for seed in range(5)]
    seeds = [[10 * number + sample for sample in range(3)] for number in range(5)]
    with pytest.MonkeyPatch.context() as patch, worker.phase("generate"):
        patch.setattr(episode_runner._Step, "__init__", recording)
        groups = runner.run(worker.engine, problems, seeds, SamplingParams(LIMIT), lambda done, of: None)
    episodes = [episode for group in groups for episode in group]
    branches = [branch for episode in episodes for branch in episode.branches]

    # Each branch is one context of the sampler, token by token, and nothing else.
    assert sorted(branch.tokens for branch in branches) == sorted(contexts.values())
    # What was sampled carries loss, each token once, with the context that it was sampled in.
    assert sum(len(branch.sampled) for branch in branches) == sum(len(one.tokens) for _, one in sampled)
    for before, completion in sampled:
        assert any(
            branch.tokens[: len(before)] == before
            and branch.tokens[len(before) : len(before) + len(completion.tokens)] == completion.tokens
            and set(range(len(before), len(before) + len(completion.tokens))) <= set(branch.sampled)
            for branch in branches
        )
    assert all(
        len(branch.tokens) <= len(episode.prompt.tokens) + LIMIT for episode in episodes for branch in episode.branches
    )
    if template == "drops":
        assert runner.turns.may_fork
    else:
        assert not runner.turns.may_fork
        assert all(len(episode.branches) == 1 for episode in episodes)

    data = [datum for episode in episodes for datum in episode_data(episode.branches, [1.0] * 9, 0.5)]
    with worker.phase("logprob"):
        worker.logprobs(data, "trainer")
    for datum in data:
        assert datum.values["trainer"].tolist() == pytest.approx(list(datum.values["rollout_logprobs"]), abs=2e-4)


def test_the_text_of_an_episode_is_the_templates(worker) -> None:
    """With a template that keeps history, sampled and appended tokens read as the template writes the conversation."""
    tokenizer = worker.policy.tokenizer
    tokenizer.chat_template = KEEPS
    turns = ChatTurns(Encoder(tokenizer, templated=True))
    conversation, encoded = turns.open(ask("hi"))
    end = tokenizer.convert_tokens_to_ids("<end>")
    tokens = list(encoded.tokens)
    for text, said, ended in (("one", "<end> [user]", True), ("two", "", False), ("", "three", True)):
        sampled = [*tokenizer(text)["input_ids"], *([end] if ended else [])]
        completion = Completion(sampled, [0.0] * len(sampled), [0.0] * len(sampled), "stop", text)
        continued = turns.answer(conversation, completion, [{"role": "tool", "content": said}])
        assert not continued.forks
        tokens += [*sampled, *continued.tokens]
    assert tokens == Encoder(tokenizer, templated=True).chat(conversation.messages).tokens
    # The environment's `<end>` is text, and each of its four ends is the template's.
    assert tokens.count(end) == 7


# As Qwen3's: thinking is kept only after the last question of the user.
THINKS = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < last.at else m.content }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("role", "text", "forks"),
    [("user", "<think>so</think>yes", True), ("user", "yes", False), ("tool", "<think>so</think>yes", False)],
)
def test_dropped_thinking_forks_only_where_it_is_dropped(worker, role, text, forks) -> None:
    tokenizer = worker.policy.tokenizer
    tokenizer.chat_template = THINKS
    encoder = Encoder(tokenizer, templated=True)
    turns = ChatTurns(encoder)
    conversation, _ = turns.open(ask("hi"))
    sampled = tokenizer(text)["input_ids"]
    turn = Completion(sampled, [0.0] * len(sampled), [0.0] * len(sampled), "length", text)
    continued = turns.answer(conversation, turn, [{"role": role, "content": "next"}])
    assert continued.forks == forks
    if forks:
        assert continued.tokens == encoder.chat(conversation.messages).tokens
        assert "so" not in tokenizer.decode(continued.tokens)
    else:
        assert tokenizer.decode(continued.tokens) == f"<end>\n[{role}]next<end>\n[assistant]"
    # Once history is what the template has, nothing is dropped a second time.
    again = turns.answer(conversation, replace(turn, text="plain"), [{"role": role, "content": "more"}])
    assert not again.forks


def test_what_an_environment_says_is_whole_though_it_repeats_the_last_token(worker) -> None:
    tokenizer = worker.policy.tokenizer
    turns = ChatTurns(Encoder(tokenizer, templated=False))
    conversation, _ = turns.open(ask("hi"))
    sampled = tokenizer("a2")["input_ids"]
    turn = Completion(sampled, [0.0] * 2, [0.0] * 2, "stop", "a2")
    continued = turns.answer(conversation, turn, [{"role": "user", "content": "2b"}])
    assert tokenizer.decode(continued.tokens) == "2b"


def test_special_tokens_that_mark_tool_calls_reach_the_parser(worker) -> None:
    tokenizer = worker.policy.tokenizer
    turns = ChatTurns(Encoder(tokenizer, templated=False))
    end = tokenizer.convert_tokens_to_ids("<end>")
    tokens = [end, *tokenizer("call")["input_ids"], end]
    turn = Completion(tokens, [0.0] * 6, [0.0] * 6, "stop", "")
    assert turns.special_text(turn) == "<end>call"
    assert turns.whole_text(turn).text == "call"


def test_a_template_that_drops_history_forks(worker) -> None:
    chance = random.Random(3)
    runner = runner_of(worker, DROPS, chance, ["go on"])
    with worker.phase("generate"):
        groups = runner.run(
            worker.engine,
            [Problem(ask("x"), metadata={"seed": 3})],
            [[1, 2]],
            SamplingParams(LIMIT),
            lambda done, of: None,
        )
    for episode in groups[0]:
        kept = [len(turn.completion.text.strip()) <= 2 for turn in episode.turns[:-1]]
        assert len(episode.branches) == 1 + kept.count(False)
        first, last = episode.branches[0], episode.branches[-1]
        assert first.tokens[: len(episode.prompt.tokens)] == episode.prompt.tokens
        assert len(last.tokens) < len(first.tokens) + sum(len(branch.tokens) for branch in episode.branches)
        assert [turn.reward for turn in episode.turns] == [0.25] * len(episode.turns)
        assert episode.scored is not None
        assert episode.scored.value == 0.25 * len(episode.turns)


def test_an_episode_that_forks_weighs_as_much_as_one_that_does_not() -> None:
    whole = [Branch([1, 2, 3, 4, 5, 6, 7], [2, 3, 5, 6], [-0.1, -0.2, -0.3, -0.4], [0, 0, 1, 1])]
    forked = [
        Branch([1, 2, 3, 4], [2, 3], [-0.1, -0.2], [0, 0]),
        Branch([1, 9, 5, 6, 7], [3, 4], [-0.3, -0.4], [1, 1]),
    ]
    for branches in (whole, forked):
        data = episode_data(branches, [2.0, -1.0], 0.125)
        assert sum(len(datum.targets) * datum.values["weights"] for datum in data) == 4 * 0.125
        assert [value for datum in data for value in datum.values["advantages"]] == [2.0, 2.0, -1.0, -1.0]
        assert [value for datum in data for value in datum.values["rollout_logprobs"]] == [-0.1, -0.2, -0.3, -0.4]
        assert all(isinstance(datum, Datum) for datum in data)


@pytest.mark.parametrize(
    ("limits", "turns", "finish"),
    [({"max_turns": 2}, 2, "length"), ({"max_turn_tokens": 2}, 4, "stop"), ({"max_turn_tokens": 40}, None, "length")],
)
def test_limits_end_an_episode(worker, limits, turns, finish) -> None:
    runner = runner_of(worker, KEEPS, random.Random(1), ["go on"], **limits)
    sampling = SamplingParams(LIMIT, ignore_eos=True)
    with worker.phase("generate"):
        ((episode,),) = runner.run(
            worker.engine, [Problem(ask("x"), metadata={"seed": 3})], [[1]], sampling, lambda done, of: None
        )
    assert episode.finish == finish
    assert turns is None or len(episode.turns) == turns
    assert len(episode.branches[0].tokens) <= len(episode.prompt.tokens) + LIMIT
    limit = limits.get("max_turn_tokens", 8)
    assert all(len(turn.completion.tokens) <= limit for turn in episode.turns)


def test_a_role_of_an_answer_that_is_none_costs_the_episode(worker) -> None:
    refuses = KEEPS.replace("[{{ m.role }}]", "[{{ m.role if m.role != 'judge' else raise_exception('who?') }}]")

    class Judged(Talks):
        def step(self, text: str):
            return {"observations": [{"role": "judge", "content": "hm"}], "reward": 1.0, "done": False}

    chance = random.Random(1)
    runner = runner_of(worker, refuses, chance, ["x"])
    runner.pool = Here(lambda: Judged(chance, []), chance)
    with worker.phase("generate"):
        ((episode,),) = runner.run(
            worker.engine, [Problem(ask("x"), metadata={"seed": 3})], [[1]], SamplingParams(4), lambda done, of: None
        )
    assert episode.scored is not None
    assert (episode.scored.failure, len(episode.turns)) == ("error", 1)
    assert "only `user` and `tool`" in episode.scored.message


def test_a_prompt_that_is_too_long_costs_the_episode(worker) -> None:
    runner = runner_of(worker, None, random.Random(1), ["x"])
    problems = [Problem(ask("y" * 65), metadata={"seed": 0}), Problem(ask("y"), metadata={"seed": 0})]
    with worker.phase("generate"):
        (long,), (short,) = runner.run(worker.engine, problems, [[1], [2]], SamplingParams(4), lambda done, of: None)
    assert long.scored is not None
    assert (long.scored.failure, long.turns, long.branches) == ("too_large", [], [])
    assert "rollout.max_prompt_tokens" in long.scored.message
    assert short.scored is not None
    assert short.scored.failure is None


def test_two_answers_of_tools_are_one_where_users_and_assistants_take_turns(worker) -> None:
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
        "{% endif %}{% endfor %}" + KEEPS
    )
    tokenizer = worker.policy.tokenizer
    tokenizer.chat_template = alternates
    turns = ChatTurns(Encoder(tokenizer, templated=True))
    conversation, _ = turns.open(ask("1"))
    ends = Completion([5], [0.0], [0.0], "stop", "2")
    turns.answer(conversation, ends, [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}])
    assert conversation.messages[-1] == {"role": "user", "content": "3\n4"}
