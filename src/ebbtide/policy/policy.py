"""The policy: log-probs of packed sequences, and gradients of the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ebbtide.config.memory import ActivationsConfig
from ebbtide.config.root import Config
from ebbtide.errors import UserError
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.arena import check_host_budget
from ebbtide.memory.gauge import transient
from ebbtide.memory.residency import Residency
from ebbtide.model.experts import use_fast_experts
from ebbtide.model.load import LoadedModel, blocks_of, decoder, logit_scaling
from ebbtide.model.output_head import head_matrix
from ebbtide.model.state_layers import missing_kernels
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.costs import GATHERED
from ebbtide.parallel.dtensor import is_fsdp_module, unsharded
from ebbtide.policy.activation_costs import probe_length
from ebbtide.policy.activation_plan import (
    PlacedBlocks,
    choose_activations,
    describe_choice,
    measure_figures,
    measure_saved_bytes,
    measure_slowdown,
    offload_capacity,
)
from ebbtide.policy.activations import ActivationHooks
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.datum import Datum, idle_datum, per_target, shared_names
from ebbtide.policy.figures import Figures, summarize, zeros
from ebbtide.policy.fuse import FusedBlocks
from ebbtide.policy.fused_activations import FusedActivations
from ebbtide.policy.fused_check import fuse_blocks
from ebbtide.policy.fused_norm import fuse_norms
from ebbtide.policy.head import Head, token_logprobs
from ebbtide.policy.losses import Loss, LossInputs, loss_head, mismatch
from ebbtide.policy.packing import MicroBatch, pack, together
from ebbtide.policy.reference import use_weights
from ebbtide.progress import AbandonableProgress, Progress, WorkAbandoned
from ebbtide.system.units import gib

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


Outputs = dict[str, Tensor]
"""What a head computes of each target [P, ...], by name."""
HeadFunction = Callable[[Tensor, Head, Tensor], Outputs]
"""A function of the hidden states before the targets [P, H], the model's output head, and the targets [P]."""


def _token_logprobs(hidden: Tensor, head: Head, targets: Tensor, *, chunk: int) -> Outputs:
    logprobs, entropies = token_logprobs(
        hidden, head.matrix, head.bias, targets, scale=head.scale, softcap=head.softcap, chunk=chunk
    )
    return {"logprobs": logprobs, "entropies": entropies}


class _PackedModel(nn.Module):
    """The model from packed tokens to what a head computes of the targets, as one module: the root of FSDP's."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float, compute: HeadFunction) -> Outputs:
        with use_attention(self.model, PACKED):
            hidden = decoder(self.model)(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                use_cache=False,
                cu_seq_lens_q=batch.starts,
                cu_seq_lens_k=batch.starts,
                max_length_q=batch.longest,
                max_length_k=batch.longest,
            ).last_hidden_state[0]  # [T, H]
        # Only [P, H] of [T, H] go through the head: positions that predict a target.
        return compute(hidden[batch.predict], output_head(self.model, temperature), batch.targets)


def output_head(model: PreTrainedModel, temperature: float = 1.0) -> Head:
    """The model's output head, whose logits are divided by `temperature`."""
    scale, softcap = logit_scaling(model.config)
    matrix, bias = head_matrix(model)
    return Head(matrix, bias, scale / temperature, softcap)


class Policy:
    """A model, and the computations of training: log-probs and gradients."""

    def __init__(self, loaded: LoadedModel, config: Config, ranks: Comm | None = None) -> None:
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, config
        self.end_tokens = loaded.end_tokens
        self.device: torch.device = loaded.model.device
        self.vocabulary_rows = loaded.vocabulary_rows
        """Token ids are below this."""
        self._generate_attention = loaded.generate_attention
        self.module = _PackedModel(loaded.model)
        """The model from packed tokens to what its head computes of them."""
        use_fast_experts(loaded.model)
        self._ranks = ranks or Comm()
        self._fused: FusedBlocks | None = None
        self._activations: ActivationHooks | FusedActivations | None = None
        self._offloader: ActivationOffloader | None = None
        self._gathered_bytes = 0

    def shard(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Shards the model among the ranks of `mesh`, by tensor parallelism and FSDP2, and moves it to `device`."""
        from ebbtide.parallel.fsdp import gathered_bytes, shard_model  # It imports torch.distributed's tensors.

        if self.config.optimizer.grad_dtype == "float32" and self.model.dtype != torch.float32:
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise UserError(
                f"`optimizer.grad_dtype: float32` with `parallel` and weights in {dtype} is not supported:"
                " FSDP2 reduces gradients over ranks in float32, but accumulates them over micro-batches in the"
                " weights' dtype. Set it to `auto`, and raise `train.microbatch_tokens` to have fewer micro-batches"
            )
        shard_model(self.model, self.module, mesh, device)
        self.device, self._gathered_bytes = device, gathered_bytes(self.model, mesh)

    def fuse_blocks(self, note: Callable[[str], None] = lambda text: None, *, joins: bool = True) -> None:
        """Replaces the forwards of the model's blocks by fused ones, on a GPU, where they compute the same, or else
        those of norms. `joins`: whether the weights may move to lie side by side."""
        self._fused = fuse_blocks(
            self.model, self.device, self._ranks.mesh, note, joins=joins, packs=self.config.memory.stream_base
        )
        if self._fused is None and self.device.type == "cuda":
            fuse_norms(self.model)
        if slow := missing_kernels(self.model):
            note(slow)

    @property
    def fused(self) -> FusedBlocks | None:
        return self._fused

    def _logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-prob [P], entropy [P]) of each target."""
        compute = partial(_token_logprobs, chunk=self.config.train.head_chunk_tokens)
        found = self._outputs(batch, temperature, compute)
        return found["logprobs"], found["entropies"]

    def _outputs(self, batch: MicroBatch, temperature: float, compute: HeadFunction) -> Outputs:
        found: Outputs = self.module(batch, temperature, compute)
        return found

    def compute_logprobs(
        self, name: str, data: Sequence[Datum], progress: Progress, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Sets the value `name` of each datum to the log-probs of its targets, without gradient, under the policy's
        weights or those given."""
        compute = partial(_token_logprobs, chunk=self.config.train.head_chunk_tokens)
        self._compute(name, data, progress, lambda *arguments: compute(*arguments)["logprobs"], weights)

    def compute_hidden(self, name: str, data: Sequence[Datum], progress: Progress) -> None:
        """Sets the value `name` of each datum to the hidden states from which its targets are predicted [targets, H],
        without gradient. Where a rank trains on the very data that it computes here, it has those of its own share
        alone, and none of other data: they are thousands of times larger than log-probs."""
        gather = self.config.train.mixes_shares
        self._compute(name, data, progress, lambda hidden, head, targets: hidden, gather=gather)

    @torch.no_grad()
    def _compute(
        self,
        name: str,
        data: Sequence[Datum],
        progress: Progress,
        compute: Callable[[Tensor, Head, Tensor], Tensor],
        weights: Mapping[str, Tensor] | None = None,
        *,
        gather: bool = True,
    ) -> None:
        mine, batches = self._local_share(data)
        found: dict[int, Tensor] = {}
        other = use_weights(self.model, weights) if weights is not None else nullcontext()
        with other, self._resharded(), self._gathered():
            for done, batch in enumerate(batches):
                outputs = self._outputs(
                    batch, self.config.logprob_temperature, lambda *arguments: {name: compute(*arguments)}
                )
                parts = torch.split(outputs[name], batch.lengths)
                found |= {
                    mine[member]: part for member, part in zip(batch.members, parts, strict=True) if member < len(mine)
                }
                none = outputs[name].new_empty((0, *outputs[name].shape[1:]))
                self._show(progress, done + 1, len(batches))
        if gather and data:
            found = self._ranks.all_gather_dict(found, none)
        for index, datum in enumerate(data):
            datum.values[name] = found.get(index, none)

    @contextmanager
    def _resharded(self) -> Iterator[None]:
        """Reshards the weights after forwards without a backward: FSDP would keep the weights outside the blocks
        gathered, and would not notice when they change."""
        try:
            yield
        finally:
            if is_fsdp_module(self.module):
                self.module.reshard()

    def _gathered(self) -> AbstractContextManager[None]:
        """Around forwards and backwards: the memory of weights that FSDP gathers in them has a row of its own."""
        return transient(GATHERED.name, self._gathered_bytes) if self._gathered_bytes else nullcontext()

    def _local_share(self, data: Sequence[Datum]) -> tuple[list[int], list[MicroBatch]]:
        """(indices of this rank's data, its micro-batches). Every rank has the same number of micro-batches; those
        added for that contain an idle datum only, whose index is one past the last."""
        units = together(data)
        shares = self._ranks.local_share([sum(data[index].length for index in unit) for unit in units])
        mine = [index for share in shares for index in units[share]]
        batches = pack([data[index] for index in mine], self.config.train.microbatch_tokens, self.device)
        if missing := self._ranks.max_rounds(len(batches)) - len(batches):
            idle = [replace(idle_datum(data[index]), group=0) for index in units[0]]  # a pair is idle as a pair
            (empty,) = pack(idle, budget=len(idle), device=self.device)
            batches += [replace(empty, members=[len(mine)] * len(idle))] * missing
        return mine, batches

    def place_activations(
        self,
        residency: Residency,
        needs: dict[str, int],
        processes: int = 1,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Carries out `memory.activations` from now on, and notes what was chosen. `needs`: host memory of everything
        else, in each of so many processes."""
        config, tokens = self.config.memory.activations, self.config.train.microbatch_tokens
        if config == ActivationsConfig():
            return
        blocks = PlacedBlocks(blocks_of(self.model), self._fused)
        figures = self._ranks.broadcast(measure_figures(config, blocks, self._probe, residency, tokens))
        choice = choose_activations(
            config, blocks, figures, lambda some: measure_saved_bytes(blocks, some, self._probe), note
        )
        reserved = offload_capacity(config, blocks, choice, self._probe, tokens)
        if reserved:
            wanted = {name: size * processes for name, size in {**needs, "activations": reserved}.items()}
            check_host_budget(wanted, self.config.memory.host_budget_gib, allocated=residency.host_bytes * processes)
            (memory,) = residency.allocate_host("activations", [reserved], pinned=True)
            self._offloader = ActivationOffloader(memory, residency.mover)
        self._activations = blocks.hooks(
            choice, self._offloader, keep_last=config.keep_last, minimum=1024 * config.minimum_kib
        )
        note(describe_choice(choice, reserved))
        measure_slowdown(self._activations, figures, self._probe, note)
        residency.mover.synchronize()
        residency.mover.drain()  # The trials are not part of any phase.
        if self._offloader is not None:
            self._offloader.drain()

    def _probe(self, tokens: int, *, backward: bool = True) -> int:
        """Runs a forward and backward as in training on about so many tokens, and leaves no gradients; returns the
        exact number of tokens."""
        length = probe_length(tokens, self.config.max_sequence_tokens)
        probes = [Datum.completion([1], [1] * (length - 1)) for _ in range(tokens // length)]
        (batch,) = pack(probes, budget=tokens, device=self.device)
        with use_attention(self.model, PACKED):
            logprobs, _ = self._logprobs(batch, temperature=1.0)
            if not backward:
                pass
            elif is_fsdp_module(self.module):  # FSDP needs gradients that accumulate; the optimizer discards them.
                logprobs.sum().backward()
            else:
                trained = [weight for weight in self.model.parameters() if weight.requires_grad]
                torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
        return batch.token_ids.numel()

    def forward_backward(self, data: Sequence[Datum], loss: Loss, progress: Progress) -> dict[str, float]:
        """Accumulates the gradient of the loss, micro-batch by micro-batch; returns metrics."""
        # The backward recomputes activations, and so needs the same attention as the forward.
        with use_attention(self.model, PACKED), self._activations or nullcontext(), self._gathered():
            return self._accumulate(data, loss, progress, backward=True)

    def forward_only(self, data: Sequence[Datum], loss: Loss, progress: Progress) -> dict[str, float]:
        """The metrics of `forward_backward`, without gradients."""
        with use_attention(self.model, PACKED), torch.no_grad(), self._resharded(), self._gathered():
            return self._accumulate(data, loss, progress, backward=False)

    def _accumulate(self, data: Sequence[Datum], loss: Loss, progress: Progress, *, backward: bool) -> dict[str, float]:
        if not data:
            raise ValueError("there are no data to compute a loss of")
        mine, batches = self._local_share(data)
        members = [*(data[index] for index in mine), replace(idle_datum(data[0]), group=0)]
        names, seen = shared_names(data), list[Figures]()
        for done, batch in enumerate(batches):
            inputs = self._loss_inputs(batch, [members[member] for member in batch.members], names, loss)
            found = loss(inputs)
            value, reported = found if isinstance(found, tuple) else (found, {})
            idle = len(mine) in batch.members
            if backward:  # An idle micro-batch uses a loss of 0: a weight of 0 would not stop a k3 that overflows.
                anchor = inputs.logprobs.sum() if inputs.logprobs.requires_grad else value
                (anchor * 0.0 if idle else value).backward()
            figures: Figures = {**reported, "loss": value.detach(), "entropy": inputs.entropies.detach().sum()}
            if "rollout_logprobs" in inputs.values:
                trainer = inputs.values.get("old_logprobs", inputs.logprobs)
                figures |= mismatch(trainer, inputs["rollout_logprobs"])
            seen.append(zeros(figures) if idle else figures)
            del inputs, found, value  # so that the next micro-batch has the memory of their values
            self._show(progress, done + 1, len(batches))
        summary = summarize(seen, sum(len(datum.targets) for datum in data), self._ranks)
        if self._offloader is not None:
            offloaded, refused = self._offloader.drain()
            summary |= {"activations_offloaded_gib": gib(offloaded), "activations_without_room_gib": gib(refused)}
        return summary

    def _show(self, progress: Progress, done: int, of: int) -> None:
        """Shows progress. Work that one rank abandons is abandoned by all, in the same round: the others would wait
        for it in the next collective."""
        if not isinstance(progress, AbandonableProgress):
            return progress(done, of)
        abandoned = False
        try:
            progress(done, of)
        except WorkAbandoned:
            abandoned = True
        if self._ranks.any(abandoned):
            raise WorkAbandoned

    def _loss_inputs(self, batch: MicroBatch, members: Sequence[Datum], names: Sequence[str], loss: Loss) -> LossInputs:
        values = per_target(members, names, batch.sequence, self.device)
        own, chunk = loss_head(loss), self.config.train.head_chunk_tokens

        def compute(hidden: Tensor, head: Head, targets: Tensor) -> Outputs:
            if own is None:
                return _token_logprobs(hidden, head, targets, chunk=chunk)
            return own(hidden, head, targets, values)

        outputs = self._outputs(batch, self.config.logprob_temperature, compute)
        if missing := {"logprobs", "entropies"} - outputs.keys():
            raise ValueError(f"the `head` of a loss has to return `logprobs` and `entropies`, and lacks {missing}")
        return LossInputs(
            logprobs=outputs.pop("logprobs"),
            entropies=outputs.pop("entropies"),
            values={**values, **outputs},
            sequence=batch.sequence,
            sequences=len(members),
            groups=[datum.group for datum in members],
        )

    @torch.no_grad()
    def verify(self, whole: PreTrainedModel | None = None) -> None:
        """Checks before training that log-probs of packed sequences through our head are the model's own, whatever else
        is in the pack. `whole`: the whole model, if the policy's is sharded and there is another."""
        # Imported here because transformers' code for models takes seconds: a wrong config is refused before that.
        from ebbtide.policy.packed_check import check_packed, neighbour_packs
        from ebbtide.policy.probe import check_attention, probes, refuse_broken_model
        from ebbtide.policy.separation import not_packable

        own_model, longest = whole or self.model, self.config.max_sequence_tokens
        both = probes(own_model.config, longest, min(len(self.tokenizer), self.vocabulary_rows))
        packs, found = neighbour_packs(both), []
        # This has to be the first forward: from it FSDP learns which module is the root.
        with self._resharded(), refuse_broken_model(lambda why: not_packable(self.model, why)):
            for some in packs:
                data = [Datum.completion(one.prompt, one.completion) for one in some]
                (batch,) = pack(data, budget=len(data) * longest, device=self.device)
                found.append(torch.split(self._logprobs(batch, temperature=1.0)[0], batch.lengths))
        # With FSDP, blocks gather their weights when they are called; weights outside the blocks have to be gathered
        # here.
        with unsharded(self.module) if own_model is self.model else nullcontext():
            check_attention(own_model, longest, both)
            check_packed(own_model, self._generate_attention, packs, found)
