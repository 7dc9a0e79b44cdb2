// What each metric is, in a few words, and its unit; docs/metrics.md says more. The first pattern that fits holds.
"use strict";

const MEANINGS = [
  [/^reward$/, "", "mean over the step's samples"],
  [/^reward_std$/, "", "standard deviation over the step's samples"],
  [/^reward\//, "", "mean of this part of the reward"],
  [/^score_failures\//, "samples", "could not be scored, and have reward 0"],
  [/^flat_groups$/, "groups", "in which every advantage is 0"],
  [/^samples$/, "samples", "sampled in the step"],
  [/^samples_trained$/, "samples", "that the loss saw"],
  [/^samples_preempted$/, "samples", "that gave way to others in the cache"],
  [/^completion_tokens$/, "tokens", "mean length of a completion"],
  [/^finished$/, "share", "of completions that ended by themselves"],
  [/^groups_under_way$/, "groups", "that go on in the next step"],
  [/^group_age$/, "steps", "mean age of the step's groups"],
  [/^group_age_max$/, "steps", "age of its oldest group"],
  [/^tokens$/, "tokens", "prompts and completions of the step"],
  [/^tokens_per_second$/, "tokens/s", "prompts and completions over the step's seconds"],
  [/^loss$/, "", "mean of the step's updates"],
  [/^entropy$/, "nats per token", "of the policy"],
  [/^kl$/, "nats per token", "estimated divergence from the reference"],
  [/^clipped$/, "share", "of tokens whose clip took effect"],
  [/^mismatch$/, "nats", "mean difference of sampler's and trainer's log-probs"],
  [/^mismatch_max$/, "nats", "largest difference of sampler's and trainer's log-probs"],
  [/^mismatch_kl$/, "nats per token", "estimated divergence of sampler and trainer"],
  [/^grad_norm$/, "", "of the gradient, before the clip"],
  [/^lr$/, "", "learning rate of the last update"],
  [/^updates$/, "updates", "made in the step"],
  [/^updates_skipped$/, "updates", "skipped, as the gradient was not finite"],
  [/^evaluate\/reward$/, "", "mean over held-out problems"],
  [/^evaluate\/pass@/, "share", "of held-out problems solved in so many tries"],
  [/^evaluate\/score_failures\//, "samples", "of held-out problems that could not be scored"],
  [/^seconds$/, "s", "of the step without its evaluation"],
  [/^seconds\//, "s", "of this phase"],
  [/^seconds_exposed/, "s", "that compute waited for memory moves"],
  [/^seconds_moved\//, "s", "that memory moves took in this phase"],
  [/^peak_gib/, "GiB", "most memory in use at once"],
  [/^reserved_gib/, "GiB", "held by torch's allocator"],
  [/^device_gib\//, "GiB", "of this holding at the phase's peak"],
  [/^host_gib$/, "GiB", "of host memory that holdings have taken"],
  [/^moved_gib/, "GiB", "moved between device and host"],
  [/^activations_offloaded_gib$/, "GiB", "of activations that waited on the host"],
  [/^activations_without_room_gib$/, "GiB", "of activations that found no room there"],
];

function meaningOf(key) {
  const [, unit, words] = MEANINGS.find(([pattern]) => pattern.test(key)) || [null, "", ""];
  return { unit, words };
}
