"""The holdings of a config, as the parts of the system describe them, and the plan that places them. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ebbtide.checkpoint.costs import SAVE, SaveCosts
from ebbtide.config.memory import MemoryConfig, OffloadConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.config.root import Config
from ebbtide.memory.plan import AFTER_STEP, HoldingName, HoldingSpec, Phase, Plan, build_plan
from ebbtide.optim.costs import OptimizerCosts, optimizer_holdings
from ebbtide.policy.model_costs import KNOWN_FROZEN, FrozenCosts, WeightsCosts
from ebbtide.policy.stream_costs import StreamCosts
from ebbtide.policy.train_costs import TrainCosts
from ebbtide.rollout.generation_costs import GenerationCosts
from ebbtide.rollout.paged.cache_costs import KV_CACHE, SEQUENCE_STATES
from ebbtide.rollout.reward_costs import REWARD_MODEL, RewardCosts

DESCRIPTIONS: Sequence[Callable[[Config, int], Sequence[HoldingSpec]]] = (
    WeightsCosts.holdings,
    StreamCosts.holdings,
    OptimizerCosts.holdings,
    FrozenCosts.holdings,
    RewardCosts.holdings,
    GenerationCosts.holdings,
    TrainCosts.holdings,
    SaveCosts.holdings,
)
"""The rows of each part, in the order of the table."""


def list_holdings(config: Config, shards: int = 1) -> list[HoldingSpec]:
    """What each part of a run with this config describes. `shards`: of the model, over the ranks."""
    return [spec for holdings in DESCRIPTIONS for spec in holdings(config, shards)]


def known_names() -> list[HoldingName]:
    """What `memory.offload` may name in any run: where a run has no such holding, the name is ignored."""
    state = [spec.name for spec in optimizer_holdings(OptimizerConfig())]
    return [*state, *KNOWN_FROZEN, REWARD_MODEL, KV_CACHE.name, SEQUENCE_STATES.name]


def plan_holdings(config: Config, shards: int = 1) -> Plan:
    """The table of a config, checked."""
    return build_plan(config.memory, list_holdings(config, shards), config.cycle, known_names())


def phases_without(names: Collection[HoldingName], config: Config) -> list[Phase]:
    """The phases in which these holdings can be away at little cost: they are fetched again behind the phase before the
    one that needs them. A save reads them where they are."""
    plan = build_plan(MemoryConfig(), list_holdings(config), config.cycle)
    away = [
        phase
        for phase in plan.phases
        if phase != SAVE and not {*plan.needs(phase), *plan.needs(plan.next_phase(phase))} & set(names)
    ]
    return [phase for phase in away if phase in OffloadConfig.model_fields] if set(away) - set(AFTER_STEP) else []
