"""Checks on a few tokens, before anything is sampled or trained, how a model's layers mix tokens: masks, states that
cross sequences, rotary embeddings.

A wrong mask, or a state that continues from one packed sequence into the next, may change log-probs by less than
bfloat16 rounding, and gradients by more than their size. So neither is judged by the difference of log-probs alone:
masks are compared cell by cell, and gradients between sequences must be zero (separation.py). What log-probs have to be
is in packed_check.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.model.load import decoder, rope_limit
from ebbtide.policy.attention import (
    FUNCTIONS,
    PACKED,
    packed_attention,
    requested_kind,
    unsupported_layer,
    use_attention,
)
from ebbtide.policy.attention_calls import AttentionCall, CallLog
from ebbtide.policy.fuse import own_forwards
from ebbtide.policy.separation import check_separation, not_packable
from ebbtide.system.transformers_internals import full_mask

PROBED = "ebbtide_probed"
_SPAN = re.compile("window|chunk|block|local|stride|d_conv|conv.*(kernel|cache)")
_COUNT = re.compile("layer|expert|num_")
_COMPUTED = {"scaling", "cu_seq_lens_q", "max_length_q"}  # Keyword arguments that packed attention uses.

SHORT = 80  # Tokens of a probe if no window needs more: delta nets have chunks of 64, which no config names.
PREDICTED = 8  # Tokens at its end whose log-probs are compared.
MOST = 8192  # Larger windows are not exceeded by a probe: masks have the square of that, and transformers makes some.


@dataclass(frozen=True)
class ProbeSequence:
    """A sequence whose last tokens are predicted."""

    prompt: list[int]
    completion: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class _CallLog:
    """The calls of attention in a forward, checked for sequences of up to `longest` tokens."""

    longest: int
    log: CallLog = field(default_factory=CallLog)


def probes(config: PretrainedConfig, longest: int, rows: int) -> tuple[ProbeSequence, ProbeSequence]:
    """(a long sequence, a short one), for a run whose sequences have at most `longest` of `rows` different tokens.

    The long one exceeds every window, chunk or block that a sequence of the run can exceed, and is no longer than those
    sequences: what lies beyond does not affect them. So the check costs a few forwards of one sequence, of which a
    training step has hundreds, on a CPU as well; with a window of 4,096 and a 1.7B model each is 14 TFLOP.
    """
    longest = max(2, longest)  # A token, and one that it predicts.
    reached = max((size for size in _spans(config.get_text_config().to_dict()) if size < min(longest, MOST)), default=0)
    length = min(longest, max(SHORT, reached + 2 * PREDICTED))
    ids = [number * 7919 % (rows - 1) for number in range(length + 5)]  # Spread over the vocabulary.
    cut = max(1, length - PREDICTED)
    short = ids[length : length + min(5, longest)]
    return ProbeSequence(ids[:cut], ids[cut:length]), ProbeSequence(short[:1], short[1:])


def _spans(found: object, name: str = "") -> Iterator[int]:
    """Integers in a config that are, by their names, the size of a window, chunk or block in tokens."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _spans(value, str(key))
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _spans(value, name)
    elif isinstance(found, int) and _SPAN.search(name) and not _COUNT.search(name):
        yield found


def check_rope(config: PretrainedConfig, longest: int) -> None:
    """Refuses a model whose rotary embeddings would depend on the rest of a batch, with sequences of up to `longest`
    tokens."""
    family, limit = config.get_text_config().model_type, rope_limit(config)
    if limit is not None and longest > limit:  # Beyond it, a sample would also change its own past as it grows.
        raise UserError(
            f"the rope of `{family}` changes for all sequences of a batch once one has more than"
            f" {limit:,} tokens, and this run allows {longest:,}: lower `rollout.max_prompt_tokens` +"
            f" `rollout.max_new_tokens` (`max_length` of `ebbtide serve`) to {limit:,}"
        )


def check_attention(
    model: PreTrainedModel, longest: int, both: tuple[ProbeSequence, ProbeSequence]
) -> list[AttentionCall]:
    """The calls of attention by the model's layers. Refuses a model in which packed sequences of up to `longest` tokens
    would not give the same results as each sequence alone."""
    check_rope(model.config, longest)
    long, short = (one.tokens for one in both)
    call_log = _CallLog(longest)
    with torch.no_grad(), refuse_broken_model(lambda why: not_packable(model, why)), warnings.catch_warnings():
        # In the first backward of a process torch warns that its thread has no CUDA context yet, and creates one.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        with use_attention(model, PROBED):
            packed_hidden(model, [long], call_log=call_log)
        with use_attention(model, PACKED), own_forwards(model), check_separation(model, len(short)):
            packed_hidden(model, [short, short[::-1]])
    return call_log.log.calls


def own_logprobs(model: PreTrainedModel, implementation: str, probe: ProbeSequence) -> Tensor:
    """Log-probs [completion] by the model's own forward of this sequence alone."""
    ids, count = torch.tensor([probe.tokens], device=model.device), len(probe.completion)
    # Logits of a long probe with a large vocabulary are gigabytes; most families can compute only the last few.
    few = {"logits_to_keep": count + 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    with torch.no_grad(), use_attention(model, implementation):
        logits = model(ids, use_cache=False, **few).logits[0, -count - 1 : -1].float()
    return log_softmax(logits, -1).gather(-1, ids[0, -count:, None])[:, 0]


@contextmanager
def refuse_broken_model(refusal: Callable[[str], UserError]) -> Iterator[None]:
    """Inside this context, exceptions of a model's code in its first forwards become the error of `refusal`: the model
    cannot be run like this."""
    try:
        yield
    except torch.OutOfMemoryError:  # The machine is at fault, not the model.
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def packed_hidden(model: PreTrainedModel, sequences: Sequence[Sequence[int]], **named: Any) -> Tensor:
    """The decoder's hidden states [T, H] of sequences packed as in training."""

    def put(values: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    lengths = [len(tokens) for tokens in sequences]
    starts, longest = put([0, *lengths], torch.int32).cumsum(0, dtype=torch.int32), max(lengths)
    output = decoder(model)(
        input_ids=put([token for tokens in sequences for token in tokens])[None],
        position_ids=put([place for length in lengths for place in range(length)])[None],
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        **named,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _probed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    call_log: _CallLog | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Packed attention of one sequence, which compares the mask that a layer wants with what packed attention
    computes."""
    kind = requested_kind(module, None, {name: each for name, each in named.items() if name not in _COMPUTED})
    place = torch.arange(query.shape[2], device=query.device)
    if call_log is not None and attention_mask is not None:
        span = getattr(attention_mask, "span", None)
        beyond = span is not None and len(place) <= span < call_log.longest  # The probe is shorter than this window.
        shown = _shows(attention_mask, kind.sees(place[:, None], place))
        if not shown or (beyond and span not in (kind.window, kind.chunk)):
            raise unsupported_layer(module, f"needs a mask other than {kind.mask_name}")
    if call_log is not None:
        call_log.log.add(module, query, key, value)
    return packed_attention(module, query, key, value, None, **named)


def _shows(mask: object, seen: Tensor) -> bool:
    """Whether a mask, boolean or additive, lets each token see exactly the tokens of `seen`."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != seen.shape:
        return False
    shown = mask if mask.dtype == torch.bool else mask == 0
    return bool((shown == seen).all())


def _whole_mask(local_size: int | None = None, **wanted: Any) -> Tensor:
    """The full mask that a layer wants, even if transformers would leave it to attention; its `span` is the window or
    chunk that it was made for."""
    mask = full_mask(**wanted)
    mask.span = local_size  # type: ignore[attr-defined]
    return mask


FUNCTIONS[PROBED] = _probed_attention
AttentionMaskInterface.register(PROBED, _whole_mask)
