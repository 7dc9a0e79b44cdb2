"""The policy: log-probs of packed sequences, and gradients of the loss on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ebbtide.config.tree import Activations as ActivationsConfig
from ebbtide.config.tree import Config
from ebbtide.errors import UserError
from ebbtide.memory.activations import Parking
from ebbtide.memory.arena import check_host_budget
from ebbtide.memory.meter import GIB
from ebbtide.memory.residency import Residency
from ebbtide.memory.shards import by_fsdp, shared_out, unsharded
from ebbtide.policy.activation_plan import capacity, choose, described, figures_for, measure, tried
from ebbtide.policy.activations import Activations
from ebbtide.policy.attention import PACKED, attention
from ebbtide.policy.head import token_logprobs
from ebbtide.policy.losses import LossInputs, mismatch, policy_loss
from ebbtide.policy.model import Loaded, blocks_of, decoder, head_shape, head_weight
from ebbtide.policy.pack import MicroBatch, Trajectory, pack
from ebbtide.policy.reference import exchanged
from ebbtide.policy.together import Alone, Together
from ebbtide.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of no weight: what a rank without work of its own computes, for the sake of those that have some.
IDLE = Trajectory([1], [1], [0.0], old_logprobs=torch.zeros(1), reference_logprobs=torch.zeros(1))


class _Logprobs(nn.Module):
    """The model from packed tokens to log-probs, as one module: so that other weights can be lent to it for a call."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        """Log-prob [P] and entropy [P] of each completion token, at `temperature`."""
        with attention(self.model, PACKED):
            hidden = decoder(self.model)(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                use_cache=False,
                cu_seq_lens_q=batch.starts,
                cu_seq_lens_k=batch.starts,
                max_length_q=batch.longest,
                max_length_k=batch.longest,
            ).last_hidden_state[0]  # [T, H]
        scale, softcap = head_shape(self.model.config)
        weight, bias = head_weight(self.model)
        # [P, H]: prompt positions go no further.
        return token_logprobs(hidden[batch.predict], weight, bias, batch.targets, scale=scale / temperature, softcap=softcap, chunk=chunk)


class Policy:
    """A model, and what training asks of it."""

    def __init__(self, loaded: Loaded, config: Config, ranks: Together | None = None) -> None:
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, config
        self.device: torch.device = loaded.model.device
        self.rows = loaded.rows
        """Token ids are below this."""
        self._generate_attention = loaded.generate_attention
        self.module = _Logprobs(loaded.model)
        """From packed tokens to log-probs."""
        self._ranks = ranks or Alone()
        self._activations: Activations | None = None
        self._parking: Parking | None = None

    def _logprobs(self, batch: MicroBatch, temperature: float, weights: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob [P] and entropy [P] of each completion token; by other weights than the model's own, if given."""
        arguments = batch, temperature, self.config.train.head_chunk_tokens
        if weights is None:
            found: tuple[Tensor, Tensor] = self.module(*arguments)
        else:
            found = functional_call(self.module, {f"model.{name}": weight for name, weight in weights.items()}, arguments)
        return found

    @torch.no_grad()
    def fill(
        self,
        name: Literal["old_logprobs", "reference_logprobs"],
        trajectories: Sequence[Trajectory],
        progress: Progress,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Sets the log-probs of each trajectory's completion, without gradient, as its `name`: by the policy's weights, or by those given."""
        mine, batches = self._mine(trajectories)
        found: dict[int, Tensor] = {}
        with exchanged(self.model, weights) if weights and self._shared_out else nullcontext(), self._resharded():
            for done, batch in enumerate(batches):
                logprobs, _ = self._logprobs(batch, self.config.rollout.temperature, None if self._shared_out else weights)
                parts = torch.split(logprobs, batch.lengths)
                found |= {mine[member]: part for member, part in zip(batch.members, parts, strict=True) if member < len(mine)}
                progress(done + 1, len(batches))
        for index, part in self._ranks.spread(found).items():
            setattr(trajectories[index], name, part)

    @property
    def _shared_out(self) -> bool:
        """Each rank has a part of the weights."""
        return any(shared_out(parameter) for parameter in self.model.parameters())

    @contextmanager
    def _resharded(self) -> Iterator[None]:
        """Around passes without a backward: FSDP keeps the weights outside of blocks gathered after them, and would not notice that they change."""
        try:
            yield
        finally:
            if by_fsdp(self.module):
                self.module.reshard()

    def _mine(self, trajectories: Sequence[Trajectory]) -> tuple[list[int], list[MicroBatch]]:
        """Which trajectories are this rank's, and its micro-batches: as many as any rank has. What is added stands for no trajectory, and counts for nothing."""
        mine = self._ranks.share([trajectory.tokens for trajectory in trajectories])
        batches = pack([trajectories[index] for index in mine], self.config.train.microbatch_tokens, self.device)
        if missing := self._ranks.rounds(len(batches)) - len(batches):
            (empty,) = pack([IDLE], budget=1, device=self.device)
            batches += [replace(empty, members=[len(mine)])] * missing
        return mine, batches

    def place_activations(self, residency: Residency, needs: dict[str, int], processes: int = 1) -> list[str]:
        """Carries out `memory.activations` from here on; gives what a person should know of it. `needs` is the host memory of everything else, in each of so many processes."""
        config, tokens = self.config.memory.activations, self.config.train.microbatch_tokens
        if config == ActivationsConfig():
            return []
        blocks = blocks_of(self.model)
        figures = self._ranks.same(figures_for(config, blocks, self._probe, residency, tokens))
        choice, notes = choose(config, blocks[0], figures, lambda some: measure(blocks, some, self._probe))
        reserved = capacity(config, blocks, choice, self._probe, tokens)
        if reserved:
            wanted = {name: size * processes for name, size in {**needs, "activations": reserved}.items()}
            check_host_budget(wanted, self.config.memory.host_budget_gib, taken=residency.host_bytes * processes)
            (memory,) = residency.host("activations", [reserved], pinned=True)
            self._parking = Parking(memory, residency.mover)
        self._activations = Activations(blocks, choice, self._parking, keep_last=config.keep_last, minimum=1024 * config.minimum_kib)
        notes += [described(choice, reserved), *tried(self._activations, figures, self._probe)]
        residency.mover.finish()
        residency.mover.take()  # what was tried is not a part of any phase
        if self._parking is not None:
            self._parking.take()
        return notes

    def _probe(self, tokens: int, *, backward: bool = True) -> int:
        """A forward like those of training, and its backward, on about so many tokens, without a gradient left behind; gives how many it were."""
        length = min(1024, tokens, self.config.rollout.max_prompt_tokens + self.config.rollout.max_new_tokens)
        probes = [Trajectory([1], [1] * (length - 1), []) for _ in range(tokens // length)]
        (batch,) = pack(probes, budget=tokens, device=self.device)
        with attention(self.model, PACKED):
            logprobs, _ = self._logprobs(batch, temperature=1.0)
            if not backward:
                pass
            elif by_fsdp(self.module):  # takes part only where gradients are kept: the optimizer discards them
                logprobs.sum().backward()
            else:
                trained = [weight for weight in self.model.parameters() if weight.requires_grad]
                torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
        return batch.token_ids.numel()

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """Adds the gradient of the loss on a minibatch, micro-batch by micro-batch; says what it saw."""
        # The backward runs parts of the forward again where activations are recomputed, and so needs the same attention.
        with attention(self.model, PACKED), self._activations or nullcontext():
            return self._accumulate(minibatch, progress, backward=True)

    def observe(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """What `accumulate` would see, without a gradient."""
        with attention(self.model, PACKED), torch.no_grad(), self._resharded():
            return self._accumulate(minibatch, progress, backward=False)

    def _accumulate(self, minibatch: Sequence[Trajectory], progress: Progress, *, backward: bool) -> dict[str, float]:
        mine, batches = self._mine(minibatch)
        members = [*(minibatch[index] for index in mine), IDLE]
        seen: list[dict[str, Tensor]] = []
        for done, batch in enumerate(batches):
            inputs = self._loss_inputs(batch, [members[member] for member in batch.members])
            loss, reported = policy_loss(self.config.loss, inputs)
            idle = len(mine) in batch.members
            if backward:  # of nothing, where there is no work: a weight of 0 would not stop a k3 that overflows
                (inputs.logprobs.sum() * 0.0 if idle else loss).backward()
            filled = inputs.old_logprobs if self.config.needs_old_logprobs else None
            reported |= mismatch(inputs.logprobs if filled is None else filled, inputs.rollout_logprobs)
            reported |= {"loss": loss.detach(), "entropy": inputs.entropies.detach().sum()}
            seen.append({name: torch.zeros_like(value) for name, value in reported.items()} if idle else reported)
            progress(done + 1, len(batches))
        summary = self._summary(seen, tokens=sum(len(trajectory.completion) for trajectory in minibatch))
        if self._parking is not None:
            parked, refused = self._parking.take()
            summary |= {"activations_offloaded_gib": parked / GIB, "activations_without_room_gib": refused / GIB}
        return summary

    def _loss_inputs(self, batch: MicroBatch, members: Sequence[Trajectory]) -> LossInputs:
        logprobs, entropies = self._logprobs(batch, self.config.rollout.temperature)

        def per_token(values: list[float]) -> Tensor:  # [S] -> [P]
            return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)[batch.sequence]

        def together(parts: list[Tensor | None]) -> Tensor | None:  # S of [completion] -> [P]
            known = [part for part in parts if part is not None]
            return torch.cat(known).to(self.device) if known else None

        sampled = [logprob for member in members for logprob in member.rollout_logprobs]
        rollout = torch.tensor(sampled, dtype=torch.float32).to(self.device, non_blocking=True)
        return LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=rollout if self.config.loss.old_logprobs == "rollout" else together([member.old_logprobs for member in members]),
            rollout_logprobs=rollout,
            reference_logprobs=together([member.reference_logprobs for member in members]),
            advantages=per_token([member.advantage for member in members]),
            weights=per_token([member.weight for member in members]),
            sequence=batch.sequence,
            sequences=len(members),
        )

    def _summary(self, seen: Sequence[dict[str, Tensor]], tokens: int) -> dict[str, float]:
        """Micro-batches' sums, of all ranks, as figures per token; one transfer from the device for all of them."""
        names = list(seen[0])
        table = torch.stack([torch.stack([reported[name].float() for name in names]) for reported in seen])  # [micro-batches, names]
        sums, largest = self._ranks.summed(table.sum(0).tolist()), self._ranks.largest(table.max(0).values.tolist())
        summary = {name: total / tokens for name, total in zip(names, sums, strict=True)}
        summary["loss"] = sums[names.index("loss")]
        summary["mismatch_max"] = largest[names.index("mismatch_max")]
        return summary

    @torch.no_grad()
    def verify(self, whole: PreTrainedModel | None = None) -> None:
        """Proves, before anything is trained, that packed log-probs through our head are the model's own for this very model: `whole`, where ranks share the policy's out and have another."""
        # Here, as transformers' code for models takes seconds to import: a wrong config is refused before it is loaded.
        from ebbtide.policy.probe import TOLERANCE, examine, not_packed, own_logprobs, probes, refusing

        own_model = whole or self.model
        longest = self.config.rollout.max_prompt_tokens + self.config.rollout.max_new_tokens
        both = probes(own_model.config, longest, min(len(self.tokenizer), self.rows))
        trajectories = [Trajectory(one.prompt, one.completion, []) for one in both]
        (batch,) = pack(trajectories, budget=2 * longest, device=self.device)
        # First of all passes: FSDP learns from it which module is the root.
        with self._resharded(), refusing(lambda why: not_packed(self.model, why)):
            packed, _ = self._logprobs(batch, temperature=1.0)
        # Its blocks gather their weights as they are called, where FSDP has shared them out; what is outside of them
        # has to be there.
        with unsharded(self.module) if own_model is self.model else nullcontext():
            examine(own_model, longest, both)
            own = [own_logprobs(own_model, self._generate_attention, one) for one in both]
        difference = (packed - torch.cat(own)).abs().mean().item()
        if not difference <= TOLERANCE[self.model.dtype]:
            raise UserError(
                f"{type(self.model).__name__}: log-probs of packed sequences differ from the model's own by {difference:.3g} on average, "
                f"more than rounding: this architecture does something between its layers and its logits that is not supported"
            )
