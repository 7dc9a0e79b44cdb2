"""Plans of GRPO with every holding that it may have, for tests that have no whole config."""

from conftest import TINY
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.plan import HoldingSpec, Plan, build_plan
from ebbtide.optim.costs import optimizer_holdings
from ebbtide.planner.holdings import known_names
from ebbtide.policy.activation_costs import ACTIVATIONS
from ebbtide.policy.head_costs import LOGITS
from ebbtide.policy.model_costs import weights_holding
from ebbtide.rollout.paged.cache_costs import KV_CACHE

REFERENCE = HoldingSpec("reference", frozenset({"logprob"}), frozen=True)


def specs_of(optimizer: OptimizerConfig | None = None, gathered_by=None) -> list[HoldingSpec]:
    state = optimizer_holdings(optimizer or OptimizerConfig())
    return [weights_holding(gathered_by), *state, REFERENCE, KV_CACHE, ACTIVATIONS, LOGITS]


def plan_of(memory: MemoryConfig | None = None, optimizer: OptimizerConfig | None = None, gathered_by=None) -> Plan:
    return build_plan(
        memory or MemoryConfig(), specs_of(optimizer, gathered_by), GrpoConfig.model_validate(TINY).cycle, known_names()
    )
