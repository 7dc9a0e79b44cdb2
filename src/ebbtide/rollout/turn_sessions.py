"""Sessions that sample turns: a sequence is sampled until its turn is over, waits for what an environment says, and
continues after it. The paged engine keeps the keys and values of sequences that wait; any other engine prefills every
turn anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.session import SampleState, Session


@dataclass(eq=False)
class Sequenced:
    """A sequence of turns."""

    state: SampleState | None = None
    """In the paged engine."""
    tokens: list[int] = field(default_factory=list)
    """For any other engine: all tokens so far."""


class TurnSession(Protocol):
    """Turns of many sequences, sampled together."""

    def begin(self, prompt: list[int], seeds: Sequence[int], max_new_tokens: int) -> list[Sequenced]:
        """Begins the first turn of a sequence for each seed."""
        ...

    def append(self, sequence: Sequenced, tokens: Sequence[int], seed: int, max_new_tokens: int) -> None:
        """Appends tokens that were not sampled to a sequence whose turn is over, and begins its next turn."""
        ...

    def end(self, sequence: Sequenced) -> None:
        """Ends a sequence."""
        ...

    def step(self) -> list[tuple[Sequenced, Completion]]:
        """Samples on, and returns the turns that are over."""
        ...

    @property
    def finished(self) -> bool:
        """Whether no turn is under way."""
        ...

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the session."""
        ...


@contextmanager
def open_turns(
    engine: Engine, sampling: SamplingParams, *, sequences: int, samples: int, prompt: int, new: int
) -> Iterator[TurnSession]:
    """Opens a session for so many sequences, of which `samples` share a prompt. Prompts have at most `prompt` tokens,
    and sequences at most `new` after them."""
    if isinstance(engine, PagedEngine):
        with engine.turn_session(sequences, samples, prompt, new) as session:
            yield _PagedTurns(session, sampling)
        engine.call_after_generate()
    else:
        yield _GeneratedTurns(engine, sampling)


class _PagedTurns:
    """Turns in a session of the paged engine."""

    def __init__(self, session: Session, sampling: SamplingParams) -> None:
        self._session, self._sampling = session, sampling
        self._sequences: dict[SampleState, Sequenced] = {}

    def begin(self, prompt: list[int], seeds: Sequence[int], max_new_tokens: int) -> list[Sequenced]:
        sampling = replace(self._sampling, max_new_tokens=max_new_tokens)
        states = self._session.add(Request(prompt, list(seeds)), sampling, turns=True)
        begun = [Sequenced(state) for state in states]
        self._sequences |= zip(states, begun, strict=True)
        return begun

    def append(self, sequence: Sequenced, tokens: Sequence[int], seed: int, max_new_tokens: int) -> None:
        assert sequence.state is not None
        self._session.append(sequence.state, tokens, seed, max_new_tokens)

    def end(self, sequence: Sequenced) -> None:
        assert sequence.state is not None
        self._session.cancel(sequence.state)
        del self._sequences[sequence.state]

    def step(self) -> list[tuple[Sequenced, Completion]]:
        over = [state for state in self._session.step() if state.finish is not None]
        return [(self._sequences[state], state.completion()) for state in over]

    @property
    def finished(self) -> bool:
        return self._session.finished

    @property
    def figures(self) -> dict[str, float]:
        return {
            "samples_preempted": float(self._session.preempted),
            "tokens_recomputed": float(self._session.recomputed),
        }


class _GeneratedTurns:
    """Turns as completions of the whole sequence so far: all that are under way are generated in one call."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine, self._sampling = engine, sampling
        self._under_way: dict[Sequenced, tuple[int, int]] = {}  # with the seed and the most tokens
        self._recomputed = 0

    def begin(self, prompt: list[int], seeds: Sequence[int], max_new_tokens: int) -> list[Sequenced]:
        begun = [Sequenced(tokens=list(prompt)) for _ in seeds]
        self._under_way |= {one: (seed, max_new_tokens) for one, seed in zip(begun, seeds, strict=True)}
        return begun

    def append(self, sequence: Sequenced, tokens: Sequence[int], seed: int, max_new_tokens: int) -> None:
        self._recomputed += len(sequence.tokens)
        sequence.tokens += tokens
        self._under_way[sequence] = (seed, max_new_tokens)

    def end(self, sequence: Sequenced) -> None:
        self._under_way.pop(sequence, None)

    def step(self) -> list[tuple[Sequenced, Completion]]:
        found: list[tuple[Sequenced, Completion]] = []
        for limit in sorted({limit for _, limit in self._under_way.values()}):
            some = [(one, seed) for one, (seed, most) in self._under_way.items() if most == limit]
            requests = [Request(list(one.tokens), [seed]) for one, seed in some]
            groups = self._engine.generate(requests, replace(self._sampling, max_new_tokens=limit), no_progress)
            for (sequence, _), (completion,) in zip(some, groups, strict=True):
                sequence.tokens += completion.tokens
                found.append((sequence, completion))
        self._under_way.clear()
        return found

    @property
    def finished(self) -> bool:
        return not self._under_way

    @property
    def figures(self) -> dict[str, float]:
        return {"tokens_recomputed": float(self._recomputed)}
