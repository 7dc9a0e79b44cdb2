"""DPO: raise the probability of the better completion of each pair against that of the worse, relative to where the
policy began."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ebbtide.algorithms.data import RunData
from ebbtide.algorithms.examples import Examples, in_slices
from ebbtide.algorithms.loop import Algorithm
from ebbtide.algorithms.updates import StepResult, train_on
from ebbtide.config.algorithms.dpo import DpoConfig
from ebbtide.policy.datum import Datum
from ebbtide.policy.losses.preference import preference_loss
from ebbtide.progress import Progress
from ebbtide.worker import Worker

REFERENCE = "reference_logprobs"


class Run(Algorithm):
    """One run of DPO on a worker."""

    def __init__(self, worker: Worker, data: RunData) -> None:
        assert isinstance(worker.config, DpoConfig)
        self._worker, self._config, self._examples = worker, worker.config, Examples(worker, data)
        loss = self._config.loss
        self.about = f"{self._examples.about}, dpo ({loss.kind})"
        self.parts = self._examples.evaluated_task
        self._loss = partial(preference_loss, kind=loss.kind, beta=loss.beta, label_smoothing=loss.label_smoothing)
        # The policy is the reference now, also in a run that resumes: its checkpoint is loaded later.
        slices = [*self._examples.slices_still_drawn()] if loss.reference == "once" else []
        sides = self._config.packed_together * self._config.data.batch_size
        self._set_reference([*slices, *in_slices(self._examples.held_out, sides)])

    def _set_reference(self, slices: Sequence[Sequence[Datum]]) -> None:
        """Sets the reference's log-probs, slice by slice, and keeps them on the host. These are forwards without
        gradients, as in an evaluation, and so they are in its phase."""
        worker = self._worker
        with worker.residency.phase("evaluate"), worker.report.working("computing the reference's log-probs") as show:
            for number, data in enumerate(slices):
                worker.logprobs(data, REFERENCE)
                found = [value for datum in data if isinstance(value := datum.values[REFERENCE], Tensor)]
                for datum, part in zip(data, torch.cat(found).cpu().split([*map(len, found)]), strict=True):
                    datum.values[REFERENCE] = part
                show(number + 1, len(slices))
        worker.residency.meter.drain()  # the first step's figures do not include it

    def step(self, step: int) -> StepResult:
        data = self._examples.next()
        if self._config.has_reference:
            with self._worker.phase("logprob") as progress:
                self._worker.logprobs(data, REFERENCE, progress, model="reference")
        return train_on(self._worker, data, self._loss, step)

    def evaluate(self, progress: Progress) -> dict[str, float]:
        found = self._worker.forward(self._examples.held_out, self._loss, progress)
        return {f"evaluate/{name}": found[name] for name in ("loss", "accuracy", "margin")}
