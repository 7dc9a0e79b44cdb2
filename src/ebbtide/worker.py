"""The worker: the model, the optimizer, the sampler, all holdings and the checkpoints of one rank, behind a few verbs.
It knows no algorithm.

    with Worker(config) as worker:
        with worker.phase("generate") as progress: groups = worker.sample(requests, sampling, progress)
        with worker.phase("train") as progress: worker.forward_backward(data, loss, progress)
        with worker.phase("step"): worker.optim_step(lr)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import numpy
import torch
from torch import Tensor

from ebbtide.checkpoint.initial import with_runs_as_models
from ebbtide.checkpoint.initial_model import load_frozen, load_initial
from ebbtide.checkpoint.resume import FOLDER
from ebbtide.checkpoint.saver import Saver
from ebbtide.checkpoint.state import SAVED_HOLDINGS, DataOrder, RunState, UnfinishedRollouts, UntrackedOrder
from ebbtide.checkpoint.store import Checkpoint
from ebbtide.config.checkpoint import CheckpointConfig
from ebbtide.config.planner_keys import with_changes
from ebbtide.config.root import Config
from ebbtide.config.train import Rehearsal
from ebbtide.errors import UserError
from ebbtide.memory.device_budget import enforce_budget
from ebbtide.memory.host import bind_to_numa_node, pci_address
from ebbtide.memory.plan import HoldingName, Phase
from ebbtide.memory.residency import Residency
from ebbtide.model.chat_template import unused_arguments_warning
from ebbtide.model.load import LoadedModel, load_model, pick_device
from ebbtide.model.lora import find_doubts, without_adapters
from ebbtide.optim.adamw import AdamW
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.group import Group
from ebbtide.planner.holdings import plan_holdings
from ebbtide.planner.host_memory import check_weights_fit, fit_to_host
from ebbtide.planner.run_plan import RunPlan, model_shape, plan_run
from ebbtide.policy.datum import Datum
from ebbtide.policy.exact import decide_exact, make_exact, why_not_exact
from ebbtide.policy.frozen import FrozenModel
from ebbtide.policy.fused_costs import can_fuse
from ebbtide.policy.head import Head
from ebbtide.policy.losses import Loss
from ebbtide.policy.model_costs import POLICY
from ebbtide.policy.policy import Policy
from ebbtide.policy.reference import freeze_reference
from ebbtide.policy.register_weights import register_weights
from ebbtide.progress import Progress, no_progress
from ebbtide.report.folder import HISTORY
from ebbtide.report.null_report import NullReport
from ebbtide.report.protocol import RankReport
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams
from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.session import Session
from ebbtide.rollout.reward_models import RewardModels
from ebbtide.rollout.weights.build import shard_policy
from ebbtide.rollout.weights.channel import RolloutChannel
from ebbtide.system.allocator import use_expandable_segments
from ebbtide.system.torch_internals import allow_deterministic_matmuls, without_split_k


def seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    # This debugging aid of torch's would write every new tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Worker:
    """One rank of a run. It is a context manager: it plans and loads when it is entered, and frees everything at the
    end."""

    policy: Policy
    engine: Engine
    """The sampler; there is one only where the config's algorithm generates or evaluates by sampling."""
    loaded: LoadedModel

    def __init__(
        self,
        config: Config,
        report: RankReport | None = None,
        *,
        rehearsal: Rehearsal | None = None,
        comm: Comm | None = None,
        channel: RolloutChannel | None = None,
        trains: bool = True,
        loaded: LoadedModel | None = None,
    ) -> None:
        """Without a report nothing is printed, and checkpoints go to `run.folder`. A rehearsal (dry run) does
        everything except the updates. One that does not train at all only samples: it makes no plan, and has neither
        policy nor optimizer. `loaded`: a model on its device that is used instead of the configured one."""
        self.rehearsal, self._trains, self._given = rehearsal, trains, loaded
        self._has_report = report is not None
        self.report = report or NullReport(Path(config.run.folder or f"runs/{config.run.name}"))
        self.comm, self._channel = comm or Comm(), channel
        # Rank 0 finds checkpoints, as a run that still writes some may have a newer one a moment later.
        self.config = self.comm.broadcast(
            with_runs_as_models(config, self.report.note) if self.comm.is_main else config
        )
        self.optimizer: AdamW | None = None
        self._reference: Mapping[str, Tensor] = {}
        self._frozen: dict[HoldingName, FrozenModel] = {}
        self.reward_models: RewardModels | None = None
        self.state: RunState | None = None
        """What a checkpoint saves and restores; None in a rehearsal."""
        self._saver: Saver | None = None
        self._wants_exact: bool | None = None
        self._plan: RunPlan | None = None
        self._stack, self._matmuls = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Decides everything, then loads the model and builds what computes with it."""
        with ExitStack() as stack:
            if self.config.rollout.engine != "vllm":  # vLLM's own allocator does not work with expandable segments.
                use_expandable_segments()
            seed_everything(self.config.seed, self.config.deterministic)
            device = pick_device(self.config.device)
            if device.type == "cuda" and (binding := bind_to_numa_node(pci_address(device))):
                self.report.note(binding)
            if self.config.deterministic:
                allow_deterministic_matmuls(device)
            stack.enter_context(self._matmuls)
            plan, host_needs = self._decide(device) if self._trains else (None, {})
            stack.enter_context(enforce_budget(device, self.config.memory.budget_gib))
            placement = plan_holdings(self.config, self.comm.shards)
            self.residency = stack.enter_context(Residency(placement, device))
            if plan is not None:
                self.residency.on_oom(plan.oom_advice)
            if self._has_report:
                self.residency.record_history(self.report.path / HISTORY)
            with self.report.working("loading the model"), self.residency.startup():
                self._load(host_needs)
            with self.report.working("pinning host memory"):
                saves = self.config.checkpoint is not None and self.config.checkpoint.async_save
                self.residency.pin(copied=SAVED_HOLDINGS if saves else ())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._saver is not None and kind is None:
                self._saver.wait()
        finally:
            if self._saver is not None:
                self._saver.close()
            self._stack.close()

    def _decide(self, device: torch.device) -> tuple[RunPlan | None, dict[str, int]]:
        """Makes the plan and sets what it decides: (the plan, if there is one; host memory by holding)."""
        report, comm = self.report, self.comm
        self._decide_exact(device)
        plan = plan_run(self.config, device, self.rehearsal, comm, report.note)
        config = self.config if plan is None else plan.config
        for ranks in (comm if comm.size > 1 else None, self._channel):
            if ranks is not None:
                report.note(ranks.describe())
        for doubt in find_doubts(config):
            report.warn(doubt)
        check_weights_fit(config, device)
        self.config, host_needs = fit_to_host(
            config,
            plan_holdings(config, comm.shards),
            report.note,
            optimizer=self.rehearsal != "none",
            share=comm.shards,
            processes=comm.local_size,
        )
        self._plan = plan
        report.set_plan(self.config, plan)  # writes config.yaml: nothing in it changes from here on but `rollout.exact`
        return plan, host_needs

    def _decide_exact(self, device: torch.device) -> None:
        """Decides whether log-probs will be exact, where that is left to the run."""
        self._wants_exact = self.config.rollout.exact
        self.config, why = decide_exact(self.config, device, self._ranks, is_fused=self._will_be_fused)
        if why and device.type == "cuda" and "generate" in self.config.cycle:
            self.report.note(f"not exact (`rollout.exact`): {why}")
        if self.config.rollout.exact and device.type == "cuda":
            self._matmuls.enter_context(without_split_k())

    def _will_be_fused(self) -> bool:
        """Whether the model's blocks will be fused on a GPU, as far as its config says."""
        try:
            return self._given is not None or can_fuse(model_shape(self.config), 2, "cuda", 1)
        except UserError:  # of a family that cannot be planned, or for which the run will end with the same error
            return False

    def _go_on_without_exact(self, why: str) -> None:
        if self._wants_exact:
            raise UserError(f"`rollout.exact: true` is not possible here: {why}. Set `rollout.exact: false`")
        self._matmuls.close()
        make_exact(self.policy, on=False)
        self.config = with_changes(self.config, {"rollout.exact": False})
        self.report.set_plan(self.config, self._plan)
        self.report.note(f"not exact (`rollout.exact`): {why}")

    def _load(self, host_needs: dict[str, int]) -> None:
        config, residency, comm = self.config, self.residency, self.comm
        device = comm.load_device(residency.device)
        # A checkpoint that is loaded later replaces the weights that the run started from.
        replaced = self.resumed is not None and not config.needs_initial_weights
        if self._given is not None:
            self.loaded = loaded = self._given
        elif replaced and config.model.lora is None:
            self.loaded = loaded = load_model(config, device)
        else:
            self.loaded = loaded = load_initial(config, device, adapter=not replaced)
        if doubt := unused_arguments_warning(loaded.tokenizer, config.model.chat_template_kwargs):
            self.report.warn(doubt)
        if not self._trains:
            self.engine = build_engine(loaded, config, residency.make_room)
            return
        self.policy = policy = Policy(loaded, config, comm)
        mode = config.rollout_weights(comm.shards)
        rollout_weights = shard_policy(policy, comm, self._channel, residency.device, mode)
        policy.fuse_blocks(self.report.note)
        if config.rollout.exact:
            if why := why_not_exact(policy, config, self._ranks):
                self._go_on_without_exact(why)
            else:
                make_exact(policy)
        with rollout_weights.materialized() as model:
            policy.verify(model)
        if config.generates:
            self.engine = rollout_weights.engine(
                lambda model: build_engine(replace(loaded, model=model), config, residency.make_room),
                lambda: self.optimizer.steps if self.optimizer is not None else {},
            )
        if self.config.rollout.exact:
            from ebbtide.rollout.paged.verify import why_not_exact_sampler  # It needs transformers' code for models.

            if why := why_not_exact_sampler(policy, self.engine, self.config.rollout.group_size):
                self._go_on_without_exact(why)
            else:
                self.report.note("exact: the sampler's log-probs are the trainer's, to the bit")
        register_weights(policy, self.config, residency)
        if config.has_reference and not config.reference_is_base:
            self._reference = freeze_reference(policy.model, residency)
        for name, model in config.frozen_models.items():
            self._frozen[name] = FrozenModel(name, load_frozen(config, model, device), config, loaded, residency, comm)
        if config.reward_models:
            self.reward_models = RewardModels(config.reward_models, residency, config.model.chat_date)
        if self.rehearsal != "none":  # last: what is verified above needs memory of its own
            self.optimizer = AdamW(policy.model.named_parameters(), config.optimizer, residency, comm, self.report.note)
        if self.optimizer is not None and self.rehearsal is None:
            policy.place_activations(residency, host_needs, comm.local_size, self.report.note)
            self.optimizer.discard_grads()  # the gradients of the trial passes

    @property
    def _ranks(self) -> int:
        """All ranks of the run, those that only sample as well."""
        return self.comm.size + (self._channel is not None)

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint that the run goes on from. A rehearsal starts over."""
        return self.report.resumed if self.rehearsal is None else None

    # The verbs

    @contextmanager
    def phase(self, name: Phase) -> Iterator[Progress]:
        """Enters a phase: the residency moves holdings for it, the meter measures it, and the report shows its
        progress."""
        if name not in self.residency.plan.phases:
            known = ", ".join(self.residency.plan.phases)
            raise ValueError(f"`{name}` is no phase of `algorithm: {self.config.algorithm}`; its phases are: {known}")
        with self.residency.phase(name), self.report.phase(name) as progress:
            yield progress

    def sample(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress = no_progress
    ) -> list[list[Completion]]:
        """The completions of each request, in the generate or the evaluate phase."""
        return self.engine.generate(requests, sampling, progress)

    @contextmanager
    def session(self, max_tokens: int | None = None) -> Iterator[Session]:
        """Opens a session of the sampler in the generate or the evaluate phase: samples that are added, stepped and
        cancelled one by one, as turns of an environment are. `max_tokens`: of a sample with its prompt; None is what
        `rollout` allows."""
        if not isinstance(self.engine, PagedEngine):
            raise TypeError(f"a session needs `rollout.engine: paged`, and the engine is {type(self.engine).__name__}")
        rollout = self.config.rollout
        with self.engine.serving_session(max_tokens or rollout.max_prompt_tokens + rollout.max_new_tokens) as session:
            yield session

    def logprobs(
        self,
        data: Sequence[Datum],
        name: str,
        progress: Progress = no_progress,
        *,
        model: HoldingName = POLICY,
    ) -> None:
        """Sets the value `name` of each datum to the log-probs of its targets under the policy, or under a frozen
        model such as `reference`."""
        if model in self._frozen:
            self._frozen[model].compute_logprobs(name, data, progress)
        elif model == POLICY:
            self.policy.compute_logprobs(name, data, progress)
        elif model == "reference" and self.config.reference_is_base:
            with without_adapters(self.policy.model):
                self.policy.compute_logprobs(name, data, progress)
        elif model == "reference" and self._reference:
            self.residency.need(model)
            self.policy.compute_logprobs(name, data, progress, weights=self._reference)
        else:
            known = [POLICY, *self._frozen, *(["reference"] if self._reference else [])]
            raise ValueError(f"`{model}` is no model of this run; its models are: {', '.join(known)}")

    def hidden(self, data: Sequence[Datum], name: str, progress: Progress = no_progress, *, model: HoldingName) -> None:
        """Sets the value `name` of each datum to a frozen model's hidden states before its targets [targets, H], from
        which its output head (`frozen_head`) computes logits."""
        self._frozen[model].compute_hidden(name, data, progress)

    def frozen_head(self, model: HoldingName) -> Head:
        """The output head of a frozen model, whose matrix is on the device in the train phase."""
        return self._frozen[model].head

    def forward_backward(self, data: Sequence[Datum], loss: Loss, progress: Progress = no_progress) -> dict[str, float]:
        """Accumulates the gradient of the loss in the train phase, and returns metrics. A rehearsal makes the forward
        pass alone."""
        run = self.policy.forward_backward if self.rehearsal is None else self.policy.forward_only
        return run(data, loss, progress)

    def forward(self, data: Sequence[Datum], loss: Loss, progress: Progress = no_progress) -> dict[str, float]:
        """The metrics of `forward_backward`, without gradients, such as for a loss on held-out data."""
        return self.policy.forward_only(data, loss, progress)

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Does the optimizer step in the step phase, and returns metrics. `lr`: None is `optimizer.lr`.

        A rehearsal moves the optimizer's state to where the step would use it, and changes no weight."""
        lr = self.config.optimizer.lr if lr is None else lr
        if self.optimizer is not None and self.rehearsal is None:
            figures = self.optimizer.step(lr)
            self.report.note_skipped_update(self.optimizer.skipped_for)
            return figures
        for name in ("master", "moments"):
            if self.residency.has(name):
                self.residency.need(name)
        return {"lr": lr, "updates_skipped": 0.0}

    def track(self, order: DataOrder, digest: str | None = None, rollouts: UnfinishedRollouts | None = None) -> None:
        """Makes the order of the data, and rollouts that are under way, part of what is saved and loaded. `digest`: of
        the data, so that a resumed run can warn where they have changed."""
        if self.optimizer is not None and self.rehearsal is None:
            group = Group(timedelta(minutes=self.config.run.distributed_timeout_minutes))
            model, optimizer, residency = self.policy.model, self.optimizer, self.residency
            scored_by = self.reward_models.digest if self.reward_models is not None else None
            self.state = RunState(self.config, model, optimizer, order, residency, group, rollouts, digest, scored_by)

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Writes a checkpoint to `checkpoints/` in the run's folder, in the save phase. With asynchronous saves it is
        complete when the next one begins, or when the worker ends."""
        self.saver.save(step, dict(metrics or {}))

    @property
    def saver(self) -> Saver:
        """Writes the checkpoints of this run."""
        if self._saver is None:
            settings = self.config.checkpoint or CheckpointConfig()
            self.report.path.mkdir(parents=True, exist_ok=True)  # a report of a run has made it
            self._saver = Saver(settings, self.report.path / FOLDER, self._saved_state, self.report.note)
        return self._saver

    def load(self, checkpoint: Path) -> int:
        """Loads a checkpoint, bit for bit, and returns its step."""
        settings = self.config.checkpoint or CheckpointConfig()
        return self._saved_state.load(
            checkpoint,
            load_rng=settings.load_rng,
            parallel=settings.fully_parallel_load,
            warn=self.report.warn,
        )

    @property
    def _saved_state(self) -> RunState:
        if self.state is None:
            self.track(UntrackedOrder())
        if self.state is None:
            raise RuntimeError("a rehearsal has nothing to save or load")
        return self.state
