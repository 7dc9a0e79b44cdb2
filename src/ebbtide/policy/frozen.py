"""A frozen model of its own architecture, such as a teacher: a holding that computes, and is never trained."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.config.model import ModelConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.residency import Residency
from ebbtide.model.load import LoadedModel, load_model
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.dtensor import local
from ebbtide.policy.datum import Datum
from ebbtide.policy.head import Head
from ebbtide.policy.model_costs import head_of
from ebbtide.policy.policy import Policy, output_head
from ebbtide.progress import Progress
from ebbtide.system.torch_internals import storage_id


class FrozenModel:
    """A frozen model. All of it is the holding `name`, except for the matrix of its output head, which is a holding of
    its own: losses over the whole vocabulary need it in the train phase as well."""

    def __init__(
        self, name: str, model: ModelConfig, config: Config, policy: LoadedModel, residency: Residency, comm: Comm
    ) -> None:
        loaded = load_model(config.model_copy(update={"model": model}), comm.load_device(residency.device))
        _check_vocabulary(name, loaded, policy)
        loaded.model.requires_grad_(False)
        self._name, self._policy = name, Policy(loaded, config, comm)
        head = output_head(loaded.model, config.logprob_temperature)
        if comm.mesh is not None:  # FSDP cuts the head's matrix up, and every rank needs all of it
            weight = head.weight.detach().to(residency.device, copy=True)
            head = Head(weight, head.bias, head.scale, head.softcap)
            self._policy.shard(comm.mesh, residency.device)
        self._policy.verify()
        self.head = head
        apart = storage_id(head.weight)
        parts = [local(parameter) for parameter in loaded.model.parameters()]
        residency.register(name, [part for part in parts if storage_id(part) != apart], frozen=True)
        residency.register(head_of(name), [head.weight], frozen=True)
        self._residency = residency

    def compute_logprobs(self, name: str, data: Sequence[Datum], progress: Progress) -> None:
        """Sets the value `name` of each datum to this model's log-probs of its targets."""
        self._need()
        self._policy.compute_logprobs(name, data, progress)

    def compute_hidden(self, name: str, data: Sequence[Datum], progress: Progress) -> None:
        """Sets the value `name` of each datum to this model's hidden states before its targets."""
        self._need()
        self._policy.compute_hidden(name, data, progress)

    def _need(self) -> None:
        self._residency.need(self._name)
        self._residency.need(head_of(self._name))


def _check_vocabulary(name: str, loaded: LoadedModel, policy: LoadedModel) -> None:
    """Raises unless both models mean the same tokens by the same numbers."""
    theirs, ours = loaded.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    shared = min(loaded.vocabulary_rows, policy.vocabulary_rows)
    odd = {token for token, number in theirs.items() ^ ours.items() if number < shared}
    if odd:
        raise UserError(
            f"the {name} and the policy have different vocabularies ({len(odd)} tokens differ, such as"
            f" {sorted(odd)[0]!r}): distillation compares the probabilities of the same tokens. Choose a {name} of the"
            " policy's family"
        )
