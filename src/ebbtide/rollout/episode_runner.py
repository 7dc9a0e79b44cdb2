"""Plays episodes: the engine samples turns while environments, in processes of their own, answer others.

An episode waits for its environment without holding up the rest: the engine goes on with all sequences that can run.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ebbtide.config.environment import EnvironmentConfig, ToolFormat
from ebbtide.config.rollout import RolloutConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.rollout.batch import sample_seed
from ebbtide.rollout.chat_turns import ChatTurns
from ebbtide.rollout.engine import Completion, Engine, SamplingParams
from ebbtide.rollout.episode_play import Play
from ebbtide.rollout.episodes import Branch, Episode, Turn
from ebbtide.rollout.prompts import Prompt
from ebbtide.rollout.turn_sessions import Sequenced, TurnSession, open_turns
from ebbtide.tasks.environment import Opening, Outcome, Reply
from ebbtide.tasks.environment_message import Answer, Failed
from ebbtide.tasks.environment_pool import LONGEST_WAIT, EnvironmentPool, EnvironmentProcess
from ebbtide.tasks.policy_handle import Asked
from ebbtide.tasks.score_message import ScoreResult, check_score, failed_score
from ebbtide.tasks.task import Problem

MAX_REFUSALS = 3  # An environment that drives its episode ends it when it gets no more turns, or is given up.
MAX_TOOL_LISTS = 64  # That are remembered.
NO_REPLY = Reply([])
REFUSED = (TemplateError, UserError)  # What encoding an environment's messages may raise.


class EpisodeRunner:
    """Plays the episodes of problems, as many at once as allowed."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        rollout: RolloutConfig,
        pool: EnvironmentPool,
        turns: ChatTurns,
        *,
        tool_format: ToolFormat,
        rows: int,
        lockstep: bool,
        drives: bool = False,
    ) -> None:
        """Token ids must be below `rows`, the rows of the embedding. `drives`: the environments drive their episodes,
        and may begin a turn with any tokens. `lockstep`: all environments are waited for before
        the next turn of any, so that the batches of the engine, and with them its float noise, never depend on time."""
        self.environment, self.rollout, self.pool, self.turns = environment, rollout, pool, turns
        self._turns_with: dict[str, ChatTurns] = {}
        self.tool_format, self.rows, self.lockstep, self.drives = tool_format, rows, lockstep, drives
        self.figures: dict[str, float] = {}
        """Metrics of the last call of `run`."""

    def turns_with(self, tools: list[dict[str, Any]]) -> ChatTurns:
        """Conversations with these tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._turns_with:
            if len(self._turns_with) == MAX_TOOL_LISTS:
                self._turns_with.clear()
            self._turns_with[key] = self.turns.with_tools(tools)
        return self._turns_with[key]

    def run(
        self,
        engine: Engine,
        problems: Sequence[Problem],
        seeds: Sequence[Sequence[int]],  # [problems][samples]
        sampling: SamplingParams,
        progress: Progress,
    ) -> list[list[Episode]]:
        """Plays one episode for each seed of each problem."""
        total = sum(map(len, seeds))
        if not total:
            return [[] for _ in problems]
        prompt, new, samples = self.rollout.max_prompt_tokens, self.rollout.max_new_tokens, max(map(len, seeds))
        with open_turns(
            engine,
            sampling,
            sequences=min(total, max(self.environment.max_concurrent, samples)),
            samples=samples,
            prompt=prompt + new if self.turns.may_fork or self.drives else prompt,
            new=new,
        ) as session:
            step = _Step(self, session, problems, seeds, progress)
            try:
                step.play()
            finally:
                step.close()
            self.figures = {"environment_idle_seconds": step.idle, **session.figures}
        return [[step.ended[group, place] for place in range(len(some))] for group, some in enumerate(seeds)]


class _Step:
    """The episodes of one call."""

    def __init__(
        self,
        runner: EpisodeRunner,
        session: TurnSession,
        problems: Sequence[Problem],
        seeds: Sequence[Sequence[int]],
        progress: Progress,
    ) -> None:
        self._runner, self._session, self._progress = runner, session, progress
        self._environment, self._pool, self._turns = runner.environment, runner.pool, runner.turns
        self._waiting = deque(enumerate(zip(problems, seeds, strict=True)))
        self._total = sum(map(len, seeds))
        self._plays: dict[EnvironmentProcess, Play] = {}
        self._sequences: dict[Sequenced, Play] = {}
        self._opening: dict[int, list[Play]] = {}  # groups whose environments are being reset, with those that are
        self._left: dict[int, int] = {}  # groups -> resets that have not been answered
        self.ended: dict[tuple[int, int], Episode] = {}
        self.idle = 0.0
        """Seconds in which no sequence could run."""

    def play(self) -> None:
        """Plays until all episodes have ended."""
        while len(self.ended) < self._total:
            self._start_groups()
            if self._runner.lockstep:
                while not self._session.finished:
                    self._sample()
                answers = []
                while self._pool.is_awaiting:
                    answers += self._answers(LONGEST_WAIT)
                answers.sort(key=lambda one: self._plays[one[0]].place)
            else:
                answers = self._answers(LONGEST_WAIT if self._session.finished else 0.0)
            for process, answer in answers:
                self._take(self._plays[process], answer)
            if not self._session.finished and not self._runner.lockstep:
                self._sample()
            self._progress(len(self.ended), self._total)

    def close(self) -> None:
        """Ends what is under way, if the work was given up."""
        for play in list(self._plays.values()):
            self._pool.close(play.process, hard=True)

    def _answers(self, wait: float) -> list[tuple[EnvironmentProcess, Answer]]:
        started = time.perf_counter()
        found = self._pool.answers(wait)
        self.idle += time.perf_counter() - started if wait else 0.0
        return found

    def _start_groups(self) -> None:
        while self._waiting:
            group, (problem, seeds) = self._waiting[0]
            if self._plays and len(self._plays) + len(seeds) > self._environment.max_concurrent:
                return
            self._waiting.popleft()
            self._opening[group], self._left[group] = [], len(seeds)
            row = {"answer": problem.answer, **problem.metadata}
            # All episodes of a group meet the same environment, so that their rewards can be compared.
            seed = problem.metadata.get("seed")
            seed = seed if isinstance(seed, int) else sample_seed(seeds[0], "environment") % 2**31
            for place, own in enumerate(seeds):
                process = self._pool.open()
                prompt = Prompt(problem, problem.question, [])
                self._plays[process] = Play((group, place), problem, own, process, prompt)
                self._pool.ask(process, "reset", problem.messages, row, seed, self._runner.tool_format)

    def _sample(self) -> None:
        for sequence, completion in self._session.step():
            play = self._sequences[sequence]
            play.turn = turn = self._turns.whole_text(completion)
            play.branches[-1].add(turn, len(play.turns))
            texts = turn.text, self._turns.special_text(turn)
            if play.asked is not None:
                self._pool.ask(play.process, "sampled", turn.tokens, turn.logprobs, turn.finish, *texts)
            else:
                self._pool.ask(play.process, "step", *texts)

    def _take(self, play: Play, answer: Answer) -> None:
        """Takes what an environment has answered."""
        failed = None
        match answer:
            case Opening() if not play.is_reset:
                failed = self._open(play, answer)
            case Asked() if play.asked is not None or not play.is_reset:
                failed = self._serve(play, answer)
            case Reply(done=True) if play.asked is not None or not play.is_reset:
                self._note(play, "", 0)
                self._finish(play)
            case Reply() if play.turn is not None and play.asked is None:
                failed = self._continue(play, play.turn, answer)
            case Outcome() if play.is_over:
                self._end(play, self._score(play, answer))
            case Failed():
                failed = answer
            case _:
                failed = Failed("error", "the environment's process sent the answer to another request")
        if failed is not None:
            self._end(play, failed_score(failed.failure, failed.message))
        if not play.is_reset:  # this was the answer to a reset
            play.is_reset, group = True, play.place[0]
            self._left[group] -= 1
            if not self._left[group]:
                self._begin_group(group)

    def _open(self, play: Play, opening: Opening) -> Failed | None:
        """Encodes the prompt of an episode; returns why it cannot be played."""
        try:
            play.conversation, encoded = self._turns.open(opening.messages)
        except REFUSED as error:
            return _unencoded(error)
        play.prompt = Prompt(play.problem, encoded.text, encoded.tokens, encoded.has_control_text)
        return self._enter(play)

    def _enter(self, play: Play) -> Failed | None:
        """Adds an episode to those of its group that can begin; returns why its prompt is refused."""
        tokens, limit = play.prompt.tokens, self._runner.rollout.max_prompt_tokens
        if len(tokens) > limit:
            return Failed(
                "too_large",
                f"the environment begins with {len(tokens)} tokens, more than `rollout.max_prompt_tokens: {limit}`",
            )
        if problem := self._token_problem(tokens):
            return problem
        play.limit = len(tokens) + self._runner.rollout.max_new_tokens
        self._opening[play.place[0]].append(play)
        return None

    def _serve(self, play: Play, asked: Asked) -> Failed | None:
        """Begins the turn that an environment asks for; returns why the episode cannot go on."""
        try:
            tokens, forks = self._asked_tokens(play, asked)
        except REFUSED as error:
            return _unencoded(error)
        if problem := self._token_problem(tokens):
            return problem
        is_first, play.asked = play.asked is None, asked
        said = self._turns.text(tokens)
        if is_first:
            play.prompt = Prompt(play.problem, said, tokens)
            return self._enter(play)
        known = len(play.branches[-1].tokens)
        length = len(tokens) + (0 if forks else known)
        self._note(play, said, max(0, length - known))
        # Its sequences may begin with any tokens: each has its limit, and all that is sampled has one.
        sampled = sum(len(branch.sampled) for branch in play.branches)
        rollout = self._runner.rollout
        room = min(rollout.max_prompt_tokens + rollout.max_new_tokens - length, rollout.max_new_tokens - sampled)
        if room <= 0 or len(play.turns) == self._environment.max_turns:
            return self._refuse(play)
        seed = sample_seed(play.seed, "turn", len(play.turns))
        self._go_on(play, tokens, seed, self._turn_limit(room, asked), forks=forks)
        return None

    def _asked_tokens(self, play: Play, asked: Asked) -> tuple[list[int], bool]:
        """(the tokens before the turn that is asked for, whether they are the prompt of a new sequence)."""
        if asked.messages:
            turns = self._runner.turns_with(asked.tools)
            if asked.continues:
                if play.conversation is None or play.turn is None:
                    raise UserError("there is no conversation that could be continued")
                continued = turns.answer(play.conversation, play.turn, asked.messages)
                return continued.tokens, continued.forks
            play.conversation, encoded = turns.open(asked.messages)
            return encoded.tokens, True
        known = play.branches[-1].tokens if play.branches else []
        appends = bool(known) and len(asked.tokens) > len(known) and asked.tokens[: len(known)] == known
        return (asked.tokens[len(known) :], False) if appends else (asked.tokens, True)

    def _refuse(self, play: Play) -> Failed | None:
        """Tells an environment that drives its episode that it has had all of its turns or tokens."""
        play.finish, play.refusals, play.conversation = "length", play.refusals + 1, None
        if play.refusals > MAX_REFUSALS:
            return Failed("error", "the environment asks for more turns although it was told that it gets none")
        limits = "`task.environment.max_turns` or `rollout.max_new_tokens`"
        self._pool.ask(play.process, "refused", f"the episode has reached a limit: {limits}")
        return None

    def _note(self, play: Play, said: str, tokens: int, reply: Reply = NO_REPLY) -> None:
        """Notes what came after a turn."""
        if play.turn is not None:
            play.turns.append(Turn(play.turn, said, tokens, reply.reward, reply.calls, reply.failed_calls))
            play.turn = None

    def _token_problem(self, tokens: Sequence[int]) -> Failed | None:
        if not tokens:
            return Failed("error", "the environment begins with an empty prompt")
        if max(tokens) >= self._runner.rows:
            return Failed("error", "the environment says a token that the model does not have")
        return None

    def _begin_group(self, group: int) -> None:
        """Begins the first turns of a group, whose prompts are the same unless its environments differ."""
        del self._left[group]
        shared: dict[tuple[tuple[int, ...], int], list[Play]] = {}
        for play in sorted(self._opening.pop(group), key=lambda one: one.place):
            tokens = tuple(play.prompt.tokens)
            shared.setdefault((tokens, self._turn_limit(play.limit - len(tokens), play.asked)), []).append(play)
        for (tokens, limit), plays in shared.items():
            for play, sequence in zip(
                plays, self._session.begin(list(tokens), [play.seed for play in plays], limit), strict=True
            ):
                play.sequence = sequence
                play.branches.append(Branch(list(tokens)))
                self._sequences[sequence] = play

    def _turn_limit(self, room: int, asked: Asked | None = None) -> int:
        asks = asked.max_tokens if asked is not None else None
        return min(room, self._environment.max_turn_tokens or room, asks or room)

    def _continue(self, play: Play, turn: Completion, reply: Reply) -> Failed | None:
        """Begins the next turn of an episode, or asks for its outcome; returns why it cannot go on."""
        assert play.conversation is not None
        assert play.sequence is not None
        said = "\n".join(message["content"] for message in reply.messages)

        def note(tokens: int) -> None:
            self._note(play, said, tokens, reply)

        branch = play.branches[-1]
        if reply.done or len(play.turns) + 1 == self._environment.max_turns:
            play.finish = "stop" if reply.done else "length"
            note(0)
            self._finish(play)
            return None
        if odd := {message["role"] for message in reply.messages} - {"user", "tool"}:
            note(0)
            return Failed("error", f"the environment answers as {', '.join(sorted(odd))}: only `user` and `tool` can")
        try:
            continued = self._turns.answer(play.conversation, turn, reply.messages)
        except REFUSED as error:
            note(0)
            return _unencoded(error)
        length = len(continued.tokens) + (0 if continued.forks else len(branch.tokens))
        if length >= play.limit:
            play.finish = "length"
            note(0)
            self._finish(play)
            return None
        if continued.tokens and (problem := self._token_problem(continued.tokens)) is not None:
            note(0)
            return problem
        note(max(0, len(continued.tokens) - len(branch.tokens)) if continued.forks else len(continued.tokens))
        seed, limit = sample_seed(play.seed, "turn", len(play.turns)), self._turn_limit(play.limit - length)
        self._go_on(play, continued.tokens, seed, limit, forks=continued.forks)
        return None

    def _go_on(self, play: Play, tokens: list[int], seed: int, limit: int, *, forks: bool) -> None:
        """Begins the next turn of an episode: after these tokens, which follow its sequence or, if it `forks`, are the
        prompt of a new one."""
        if forks:
            self._release(play)
            (play.sequence,) = self._session.begin(tokens, [seed], limit)
            play.branches.append(Branch(list(tokens)))
            self._sequences[play.sequence] = play
        else:
            assert play.sequence is not None
            play.branches[-1].tokens += tokens
            self._session.append(play.sequence, tokens, seed, limit)

    def _finish(self, play: Play) -> None:
        """Asks for the outcome of an episode that is over."""
        self._release(play)
        play.is_over = True
        self._pool.ask(play.process, "finish")

    def _release(self, play: Play) -> None:
        if play.sequence is not None:
            self._session.end(play.sequence)
            del self._sequences[play.sequence]
            play.sequence = None

    def _score(self, play: Play, outcome: Outcome) -> ScoreResult | None:
        if outcome.reward is None:
            return None
        return check_score(sum(turn.reward for turn in play.turns) + outcome.reward, outcome.parts)

    def _end(self, play: Play, scored: ScoreResult | None) -> None:
        """Ends an episode. What was sampled before a failure stays part of it."""
        failed = scored is not None and scored.failure is not None
        self._note(play, "", 0)
        self._release(play)
        self._pool.close(play.process, hard=failed)
        del self._plays[play.process]
        self.ended[play.place] = Episode(
            play.prompt, play.turns, play.branches, play.finish, scored, play.process.seconds
        )


def _unencoded(error: Exception) -> Failed:
    return Failed("error", f"the environment's messages cannot be encoded: {error}")
