"""Tries transformers' `generate` before it samples anything: with some families it does not sample from what the
model's own forward computes, where prompts are padded, a window is exceeded, or a cache has too few layers."""

from __future__ import annotations

from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.parallel.dtensor import is_sharded
from ebbtide.policy.probe import check_rope, probes, refuse_broken_model
from ebbtide.progress import no_progress
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.huggingface import HuggingFaceEngine
from ebbtide.rollout.sampled_check import check_own

NEW = 8  # tokens that are sampled


def build_checked_engine(loaded: LoadedModel, batch: int, longest: int) -> HuggingFaceEngine:
    """Builds an engine for sequences of at most `longest` tokens. It raises if what it samples does not have the
    log-probs of the model's own forward."""
    model = loaded.model
    check_rope(model.config, longest)
    engine = HuggingFaceEngine(loaded, batch)
    if any(is_sharded(weight) for weight in model.parameters()):
        return engine  # the model's own forward needs all ranks, and `generate` has none of a rank's own

    def refusal(why: str) -> UserError:
        family = model.config.get_text_config().model_type
        return UserError(
            f"transformers' `generate` does not sample right from `{family}` ({why}): set `rollout.engine: paged`, or"
            " choose another model"
        )

    both = probes(model.config, longest, min(len(loaded.tokenizer), loaded.vocabulary_rows))
    requests = [Request(one.prompt, [0]) for one in both]
    sampling = SamplingParams(min(NEW, len(both[0].completion)), ignore_eos=True)
    with refuse_broken_model(refusal):
        check_own(loaded, requests, engine.generate(requests, sampling, no_progress), refusal)
    return engine
