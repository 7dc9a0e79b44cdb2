"""State slots in which a state is no more than the tokens that it has seen, so that a test notices a token that is seen
twice, a state that is another sequence's, and one that was given up."""

from collections.abc import Sequence

from ebbtide.rollout.paged.scheduler import PrefillChunk, PromptGroup, ScheduledSample


class SimulatedStates:
    def __init__(self, count: int | None) -> None:
        self._exist = count is not None
        self._seen: dict[int, tuple[int, int]] = {}  # slot -> (the number of its owner, the tokens that it has seen)

    def run(self, work: Sequence[PrefillChunk | ScheduledSample]) -> None:
        """Runs a pass: each sequence reads the state before its tokens, and leaves the one after them."""
        if not self._exist:
            return
        after = {}
        for item in work:
            chunk = item.newest_token if isinstance(item, ScheduledSample) else item
            read, write = chunk.states
            prompt = 0 if isinstance(chunk.owner, PromptGroup) else len(chunk.group.prompt)
            if read is None:
                assert prompt + chunk.first == 0
            else:
                assert self._seen[read] == (self._owner(chunk), prompt + chunk.first)
            assert write not in after
            after[write] = (chunk.owner.number * 2 + bool(prompt), prompt + chunk.last)
        self._seen |= after

    def _owner(self, chunk: PrefillChunk) -> int:
        """The number of whoever had the state before a chunk."""
        if isinstance(chunk.owner, PromptGroup) or chunk.first == 0:
            return chunk.group.number * 2
        return chunk.owner.number * 2 + 1

    def move(self, used: Sequence[int]) -> None:
        """Moves the states in some slots to the front of others."""
        self._seen = {place: self._seen[slot] for place, slot in enumerate(used) if slot in self._seen}
