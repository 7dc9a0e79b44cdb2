"""The weights that a run of one rank generates with: the very tensors that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ebbtide.rollout.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RolloutWeights:
    """The weights that rollouts are generated with. On a single rank these are the policy's own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @contextmanager
    def materialized(self) -> Iterator[PreTrainedModel]:
        """Yields the model with all of its weights. All ranks must call this together."""
        yield self._model

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        """Builds an engine that generates with these weights. `steps` returns the optimizer's step counts: as long as
        they are the same, so are the weights."""
        with self.materialized() as model:
            return build(model)
