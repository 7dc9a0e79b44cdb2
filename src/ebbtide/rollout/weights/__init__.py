"""The weights that rollouts are generated with: the policy's own, all-gathered ones, or copies on rollout workers."""
