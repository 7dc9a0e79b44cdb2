"""Checks on a few tokens, before anything is sampled or trained, how a model's layers mix tokens: masks, states that
cross sequences, rotary embeddings.

A wrong mask, or a state that continues from one packed sequence into the next, may change log-probs by less than
bfloat16 rounding, and gradients by more than their size. So neither is judged by the difference of log-probs: masks are
compared cell by cell, and gradients between sequences must be zero.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from ebbtide.errors import UserError
from ebbtide.model.load import decoder, rope_limit
from ebbtide.policy.attention import PACKED, packed_attention, requested_kind, unsupported_layer, use_attention
from ebbtide.policy.attention_calls import AttentionCall, CallLog
from ebbtide.policy.fuse import own_forwards
from ebbtide.system.transformers_internals import full_mask

PROBED = "ebbtide_probed"
_SPAN, _COUNT = re.compile("window|chunk|block|local|stride"), re.compile("layer|expert|num_")
_COMPUTED = {"scaling", "cu_seq_lens_q", "max_length_q"}  # Keyword arguments that packed attention uses.

# Maximum mean difference of log-probs from the model's own forward: many times the rounding of each type.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}

SHORT = 24  # Tokens of a probe if no window needs more.
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
            _forward(model, [long], call_log=call_log)
        with use_attention(model, PACKED), own_forwards(model), _check_separation(model, len(short)):
            _forward(model, [short, short[::-1]])
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


def not_packable(model: PreTrainedModel, why: str) -> UserError:
    """The error for a model that cannot be run on packed sequences."""
    family = model.config.get_text_config().model_type
    return UserError(f"`{family}` cannot be run on packed sequences ({why}): choose another model")


def not_finite(block: nn.Module) -> UserError:
    """The error for a block that computes NaN or Inf."""
    broken = [name for name, weight in block.named_parameters() if not weight.isfinite().all()]
    what = f"its weight {broken[0]} has some" if broken else "but all of its weights are finite: check the config.json"
    return UserError(
        f"a {type(block).__name__} of the model computes numbers that are not finite (NaN or Inf), {what}: the model is"
        " damaged, or diverged in its training. Download it again"
    )


def _forward(model: PreTrainedModel, sequences: Sequence[Sequence[int]], **named: Any) -> None:
    """Runs the decoder on sequences packed as in training."""

    def put(values: Sequence[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    lengths = [len(tokens) for tokens in sequences]
    starts, longest = put([0, *lengths], torch.int32).cumsum(0, dtype=torch.int32), max(lengths)
    decoder(model)(
        input_ids=put([token for tokens in sequences for token in tokens])[None],
        position_ids=put([place for length in lengths for place in range(length)])[None],
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        **named,
    )


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


AttentionInterface.register(PROBED, _probed_attention)
AttentionMaskInterface.register(PROBED, _whole_mask)


@contextmanager
def _check_separation(model: PreTrainedModel, first: int) -> Iterator[None]:
    """Inside this context each layer is also run by itself on two packed sequences of `first` tokens each: the outputs
    of one must have no gradient in the other. Between separate sequences it is exactly zero in any type and with any
    weights; with a convolution, a state or a custom attention that crosses sequences it is not."""
    layers = model.config.get_text_config().num_hidden_layers
    lists = (found for found in decoder(model).modules() if isinstance(found, nn.ModuleList))
    blocks = next((found for found in lists if len(found) == layers), None)
    if blocks is None:
        raise not_packable(model, f"it has no list of its {layers} layers")
    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            why = (
                f"in layer {number}, a {type(block).__name__}, tokens see those of other sequences: "
                "by a state, a convolution or attention of its own"
            )
            # This hook runs after those that gather a sharded block's weights.
            check = partial(_check_block, first, not_packable(model, why))
            hooks.enter_context(block.register_forward_pre_hook(check, with_kwargs=True))
        yield


def _check_block(first: int, mixed: UserError, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises `mixed` if the block's outputs for one sequence have a gradient in the other."""

    def by_token(some: object) -> bool:
        return isinstance(some, Tensor) and some.is_floating_point() and some.dim() > 1 and some.shape[-2] == 2 * first

    with torch.enable_grad():
        inputs = {id(some): some.detach().requires_grad_() for some in (*given, *named.values()) if by_token(some)}
        # Copies, because a block may change its input in place.
        copies = {place: some.clone() for place, some in inputs.items()}
        by_name = {name: copies.get(id(some), some) for name, some in named.items()}
        found = block.forward(*(copies.get(id(some), some) for some in given), **by_name)
    several = found if isinstance(found, tuple) else (found,)
    outputs = [some for some in several if by_token(some) and some.requires_grad]
    for others in (slice(first), slice(first, None)):  # The sequence in which there must be no gradient.
        weights = []
        for some in outputs:  # The weights are any numbers that do not cancel out.
            weight = torch.arange(some.numel(), device=some.device).sin().view_as(some).to(some.dtype)
            weight[..., others, :] = 0
            weights.append(weight)
        gradients = torch.autograd.grad(outputs, list(inputs.values()), weights, retain_graph=True, allow_unused=True)
        if any(some is not None and not some.isfinite().all() for some in (*outputs, *gradients)):
            raise not_finite(block)
        if not outputs or any(gradient is not None and gradient[..., others, :].any() for gradient in gradients):
            raise mixed
