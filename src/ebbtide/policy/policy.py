"""The policy: log-probs of packed sequences, and gradients of the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import ActivationsConfig
from ebbtide.errors import UserError
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.arena import check_host_budget
from ebbtide.memory.residency import Residency
from ebbtide.model.load import LoadedModel, blocks_of, decoder, head_weight, logit_scaling
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.dtensor import is_fsdp_module, is_sharded, unsharded
from ebbtide.policy.activation_costs import probe_length
from ebbtide.policy.activation_plan import (
    choose_activations,
    describe_choice,
    measure_figures,
    measure_saved_bytes,
    measure_slowdown,
    offload_capacity,
)
from ebbtide.policy.activations import ActivationHooks
from ebbtide.policy.attention import PACKED, use_attention
from ebbtide.policy.head import token_logprobs
from ebbtide.policy.losses import LossInputs, mismatch, policy_loss
from ebbtide.policy.packing import MicroBatch, Trajectory, pack
from ebbtide.policy.reference import swap_weights
from ebbtide.progress import Progress
from ebbtide.system.units import gib

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

# A trajectory of weight 0, which a rank without work computes so that collectives match those of the other ranks.
IDLE = Trajectory([1], [1], [0.0], old_logprobs=torch.zeros(1), reference_logprobs=torch.zeros(1))


class _Logprobs(nn.Module):
    """The model from packed tokens to log-probs as one module, so that a call can use other weights
    (`functional_call`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        """(log-prob [P], entropy [P]) of each completion token, at `temperature`."""
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
        scale, softcap = logit_scaling(self.model.config)
        weight, bias = head_weight(self.model)
        # Only [P, H] of [T, H] go through the head: positions that predict a completion token.
        return token_logprobs(
            hidden[batch.predict], weight, bias, batch.targets, scale=scale / temperature, softcap=softcap, chunk=chunk
        )


class Policy:
    """A model, and the computations of training: log-probs and gradients."""

    def __init__(self, loaded: LoadedModel, config: GrpoConfig, ranks: Comm | None = None) -> None:
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, config
        self.device: torch.device = loaded.model.device
        self.vocabulary_rows = loaded.vocabulary_rows
        """Token ids are below this."""
        self._generate_attention = loaded.generate_attention
        self.module = _Logprobs(loaded.model)
        """The model from packed tokens to log-probs."""
        self._ranks = ranks or Comm()
        self._activations: ActivationHooks | None = None
        self._offloader: ActivationOffloader | None = None

    def shard(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Shards the model among the ranks of `mesh`, by tensor parallelism and FSDP2, and moves it to `device`."""
        from ebbtide.parallel.fsdp import shard_model  # It imports torch.distributed's tensors.

        if self.config.optimizer.grad_dtype == "float32" and self.model.dtype != torch.float32:
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise UserError(
                f"`optimizer.grad_dtype: float32` with `parallel` and weights in {dtype} is not supported:"
                " FSDP2 reduces gradients over ranks in float32, but accumulates them over micro-batches in the"
                " weights' dtype. Set it to `auto`, and raise `train.microbatch_tokens` to have fewer micro-batches"
            )
        shard_model(self.model, self.module, mesh, device)
        self.device = device

    def _logprobs(
        self, batch: MicroBatch, temperature: float, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-prob [P], entropy [P]) of each completion token, under `weights` instead of the model's own if given."""
        arguments = batch, temperature, self.config.train.head_chunk_tokens
        if weights is None:
            found: tuple[Tensor, Tensor] = self.module(*arguments)
        else:
            found = functional_call(
                self.module, {f"model.{name}": weight for name, weight in weights.items()}, arguments
            )
        return found

    @torch.no_grad()
    def compute_logprobs(
        self,
        name: Literal["old_logprobs", "reference_logprobs"],
        trajectories: Sequence[Trajectory],
        progress: Progress,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Sets the attribute `name` of each trajectory to the log-probs of its completion, without gradient, under the
        policy's weights or those given."""
        mine, batches = self._local_share(trajectories)
        found: dict[int, Tensor] = {}
        with swap_weights(self.model, weights) if weights and self._is_sharded else nullcontext(), self._resharded():
            for done, batch in enumerate(batches):
                logprobs, _ = self._logprobs(
                    batch, self.config.logprob_temperature, None if self._is_sharded else weights
                )
                parts = torch.split(logprobs, batch.lengths)
                found |= {
                    mine[member]: part for member, part in zip(batch.members, parts, strict=True) if member < len(mine)
                }
                progress(done + 1, len(batches))
        for index, part in self._ranks.all_gather_dict(found).items():
            setattr(trajectories[index], name, part)

    @property
    def _is_sharded(self) -> bool:
        """Whether the weights are sharded over ranks."""
        return any(is_sharded(parameter) for parameter in self.model.parameters())

    @contextmanager
    def _resharded(self) -> Iterator[None]:
        """Reshards the weights after forwards without a backward: FSDP would keep the weights outside the blocks
        gathered, and would not notice when they change."""
        try:
            yield
        finally:
            if is_fsdp_module(self.module):
                self.module.reshard()

    def _local_share(self, trajectories: Sequence[Trajectory]) -> tuple[list[int], list[MicroBatch]]:
        """(indices of this rank's trajectories, its micro-batches). Every rank has the same number of micro-batches;
        those added for that contain `IDLE` only, whose index is one past the last."""
        mine = self._ranks.local_share([trajectory.tokens for trajectory in trajectories])
        batches = pack([trajectories[index] for index in mine], self.config.train.microbatch_tokens, self.device)
        if missing := self._ranks.max_rounds(len(batches)) - len(batches):
            (empty,) = pack([IDLE], budget=1, device=self.device)
            batches += [replace(empty, members=[len(mine)])] * missing
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
        blocks = blocks_of(self.model)
        figures = self._ranks.broadcast(measure_figures(config, blocks, self._probe, residency, tokens))
        choice = choose_activations(
            config, blocks[0], figures, lambda some: measure_saved_bytes(blocks, some, self._probe), note
        )
        reserved = offload_capacity(config, blocks, choice, self._probe, tokens)
        if reserved:
            wanted = {name: size * processes for name, size in {**needs, "activations": reserved}.items()}
            check_host_budget(wanted, self.config.memory.host_budget_gib, allocated=residency.host_bytes * processes)
            (memory,) = residency.allocate_host("activations", [reserved], pinned=True)
            self._offloader = ActivationOffloader(memory, residency.mover)
        self._activations = ActivationHooks(
            blocks, choice, self._offloader, keep_last=config.keep_last, minimum=1024 * config.minimum_kib
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
        probes = [Trajectory([1], [1] * (length - 1), []) for _ in range(tokens // length)]
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

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """Accumulates the gradient of the loss on a minibatch, micro-batch by micro-batch; returns metrics."""
        # The backward recomputes activations, and so needs the same attention as the forward.
        with use_attention(self.model, PACKED), self._activations or nullcontext():
            return self._accumulate(minibatch, progress, backward=True)

    def forward_only(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """The metrics of `accumulate`, without gradients."""
        with use_attention(self.model, PACKED), torch.no_grad(), self._resharded():
            return self._accumulate(minibatch, progress, backward=False)

    def _accumulate(self, minibatch: Sequence[Trajectory], progress: Progress, *, backward: bool) -> dict[str, float]:
        mine, batches = self._local_share(minibatch)
        members = [*(minibatch[index] for index in mine), IDLE]
        seen: list[dict[str, Tensor]] = []
        for done, batch in enumerate(batches):
            inputs = self._loss_inputs(batch, [members[member] for member in batch.members])
            loss, reported = policy_loss(self.config.loss, inputs)
            idle = len(mine) in batch.members
            if backward:  # An idle micro-batch uses a loss of 0: a weight of 0 would not stop a k3 that overflows.
                (inputs.logprobs.sum() * 0.0 if idle else loss).backward()
            filled = inputs.old_logprobs if self.config.needs_old_logprobs else None
            reported |= mismatch(inputs.logprobs if filled is None else filled, inputs.rollout_logprobs)
            reported |= {"loss": loss.detach(), "entropy": inputs.entropies.detach().sum()}
            seen.append({name: torch.zeros_like(value) for name, value in reported.items()} if idle else reported)
            progress(done + 1, len(batches))
        summary = self._summary(seen, tokens=sum(len(trajectory.completion) for trajectory in minibatch))
        if self._offloader is not None:
            offloaded, refused = self._offloader.drain()
            summary |= {"activations_offloaded_gib": gib(offloaded), "activations_without_room_gib": gib(refused)}
        return summary

    def _loss_inputs(self, batch: MicroBatch, members: Sequence[Trajectory]) -> LossInputs:
        logprobs, entropies = self._logprobs(batch, self.config.logprob_temperature)

        def per_token(values: list[float]) -> Tensor:  # [S] -> [P]
            return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)[batch.sequence]

        def concatenate(parts: list[Tensor | None]) -> Tensor | None:  # S of [completion] -> [P]
            known = [part for part in parts if part is not None]
            return torch.cat(known).to(self.device) if known else None

        sampled = [logprob for member in members for logprob in member.rollout_logprobs]
        rollout = torch.tensor(sampled, dtype=torch.float32).to(self.device, non_blocking=True)
        return LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=(
                rollout
                if self.config.loss.old_logprobs == "rollout"
                else concatenate([member.old_logprobs for member in members])
            ),
            rollout_logprobs=rollout,
            reference_logprobs=concatenate([member.reference_logprobs for member in members]),
            advantages=per_token([member.advantage for member in members]),
            weights=per_token([member.weight for member in members]),
            sequence=batch.sequence,
            sequences=len(members),
        )

    def _summary(self, seen: Sequence[dict[str, Tensor]], tokens: int) -> dict[str, float]:
        """Metrics per token from the sums of all micro-batches and ranks; one transfer from the device for all."""
        names = list(seen[0])
        # [micro-batches, names]
        table = torch.stack([torch.stack([reported[name].float() for name in names]) for reported in seen])
        sums, largest = self._ranks.all_sum(table.sum(0).tolist()), self._ranks.all_max(table.max(0).values.tolist())
        summary = {name: total / tokens for name, total in zip(names, sums, strict=True)}
        summary["loss"] = sums[names.index("loss")]
        summary["mismatch_max"] = largest[names.index("mismatch_max")]
        return summary

    @torch.no_grad()
    def verify(self, whole: PreTrainedModel | None = None) -> None:
        """Checks before training that log-probs of packed sequences through our head are the model's own. `whole`: the
        whole model, if the policy's is sharded and there is another."""
        # Imported here because transformers' code for models takes seconds: a wrong config is refused before that.
        from ebbtide.policy.probe import (
            TOLERANCE,
            check_attention,
            not_packable,
            own_logprobs,
            probes,
            refuse_broken_model,
        )

        own_model = whole or self.model
        longest = self.config.max_sequence_tokens
        both = probes(own_model.config, longest, min(len(self.tokenizer), self.vocabulary_rows))
        trajectories = [Trajectory(one.prompt, one.completion, []) for one in both]
        (batch,) = pack(trajectories, budget=2 * longest, device=self.device)
        # This has to be the first forward: from it FSDP learns which module is the root.
        with self._resharded(), refuse_broken_model(lambda why: not_packable(self.model, why)):
            packed, _ = self._logprobs(batch, temperature=1.0)
        # With FSDP, blocks gather their weights when they are called; weights outside the blocks have to be gathered
        # here.
        with unsharded(self.module) if own_model is self.model else nullcontext():
            check_attention(own_model, longest, both)
            own = [own_logprobs(own_model, self._generate_attention, one) for one in both]
        difference = (packed - torch.cat(own)).abs().mean().item()
        if not difference <= TOLERANCE[self.model.dtype]:
            raise UserError(
                f"{type(self.model).__name__}: log-probs of packed sequences differ from the model's own by"
                f" {difference:.3g} on average, more than rounding: this architecture does something between its layers"
                " and its logits that is not supported. Choose another model"
            )
