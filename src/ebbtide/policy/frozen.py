"""A frozen model of its own architecture, such as a teacher: a holding that computes, and is never trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor

from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.buckets import allocate_buckets
from ebbtide.memory.residency import Residency
from ebbtide.model.load import LoadedModel
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.dtensor import local
from ebbtide.policy.datum import Datum
from ebbtide.policy.divergence_costs import hidden_of
from ebbtide.policy.head import Head
from ebbtide.policy.model_costs import head_of
from ebbtide.policy.policy import Policy, output_head
from ebbtide.progress import Progress


class FrozenModel:
    """A frozen model. All of it is the holding `name`, except for the matrix of its output head, which is a holding of
    its own: losses over the whole vocabulary need it in the train phase as well."""

    def __init__(
        self, name: str, loaded: LoadedModel, config: Config, policy: LoadedModel, residency: Residency, comm: Comm
    ) -> None:
        """`loaded`: the model on the host. On the device it is a few large buckets, and never there twice."""
        _check_vocabulary(name, loaded, policy)
        loaded.model.requires_grad_(False)
        self._name, self._policy = name, Policy(loaded, config, comm)
        head = output_head(loaded.model, config.logprob_temperature).weight
        if comm.shards == 1:  # replicas compute on their own: nothing of a frozen model is ever reduced
            rest = [parameter for parameter in loaded.model.parameters() if parameter is not head]
            buckets = [*move_into_buckets(rest, residency.device)]
            (matrix,) = move_into_buckets([head], residency.device)
            loaded.model.to(residency.device)  # its buffers
            self._policy.device = residency.device
            self._head = output_head(loaded.model, config.logprob_temperature)
        else:  # FSDP shards the head's matrix, and every rank needs all of it in training
            assert comm.mesh is not None
            matrix = head.detach().to(residency.device, copy=True)
            whole = output_head(loaded.model, config.logprob_temperature)
            bias = None if whole.bias is None else whole.bias.detach().to(residency.device, copy=True)
            self._head = replace(whole, matrix=matrix, bias=bias)
            self._policy.shard(comm.mesh, residency.device)
            buckets = [local(parameter) for parameter in loaded.model.parameters()]
        self._policy.fuse_blocks(joins=False)  # its weights stay in their buckets
        self._policy.verify()
        for holding, tensors in ((name, buckets), (head_of(name), [matrix])):
            residency.register(holding, tensors, frozen=True)
            residency.offload_at_start(holding)
        self._residency, self._hidden = residency, list[ref[Tensor]]()
        if hidden_of(name) in residency.plan.specs:
            hidden = self._hidden
            residency.register(hidden_of(name), lambda: [found for one in hidden if (found := one()) is not None])

    @property
    def head(self) -> Head:
        """Its output head, on the device: compute waits for its matrix if that is on its way."""
        self._residency.need(head_of(self._name))
        return self._head

    def compute_logprobs(self, name: str, data: Sequence[Datum], progress: Progress) -> None:
        """Sets the value `name` of each datum to this model's log-probs of its targets."""
        self._need()
        self._policy.compute_logprobs(name, data, progress)

    def compute_hidden(self, name: str, data: Sequence[Datum], progress: Progress) -> None:
        """Sets the value `name` of each datum to this model's hidden states before its targets."""
        self._need()
        self._policy.compute_hidden(name, data, progress)
        alive = [one for one in self._hidden if one() is not None]
        self._hidden[:] = [*alive, *(ref(value) for datum in data if isinstance(value := datum.values[name], Tensor))]

    def _need(self) -> None:
        self._residency.need(self._name)
        self._residency.need(head_of(self._name))


@torch.no_grad()
def move_into_buckets(parameters: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Moves parameters into buckets on the device, and yields those."""
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        some = [parameter for parameter in parameters if parameter.dtype == dtype]
        flats, views = allocate_buckets([parameter.shape for parameter in some], dtype, device)
        for parameter, view in zip(some, views, strict=True):
            parameter.data = view.copy_(parameter)
        yield from flats


def _check_vocabulary(name: str, loaded: LoadedModel, policy: LoadedModel) -> None:
    """Raises unless both models mean the same tokens by the same numbers."""
    theirs, ours = (
        {(token, number) for token, number in one.tokenizer.get_vocab().items() if number < one.vocabulary_rows}
        for one in (loaded, policy)
    )
    odd = {token for token, _ in theirs ^ ours}
    if odd:
        raise UserError(
            f"the {name} and the policy have different vocabularies ({len(odd)} tokens differ, such as"
            f" {sorted(odd)[0]!r}): distillation compares the probabilities of the same tokens. Choose a {name} of the"
            " policy's family"
        )
