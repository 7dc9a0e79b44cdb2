"""What a model does between its tokens, tried on a few of them before anything is sampled or trained: masks, layers
that mix sequences, ropes.

A wrong mask, or a state that runs on from one packed sequence into the next, may change log-probs by less than
bfloat16 rounds, and gradients by more than their size. So neither is judged by how far log-probs are off: masks are
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
from transformers.masking_utils import sdpa_mask

from ebbtide.errors import UserError
from ebbtide.policy.attention import PACKED, attention, packed_attention, unsupported, window_asked
from ebbtide.policy.model import decoder, rope_limit

PROBED = "ebbtide_probed"
_SPAN, _COUNT = re.compile("window|chunk|block|local|stride"), re.compile("layer|expert|num_")
_COMPUTED = {"scaling", "cu_seq_lens_q", "max_length_q"}  # what packed attention takes by name

# Most that log-probs may differ from the model's own forward, on average: rounding of each type, many times over.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}

SHORT = 24  # tokens of a probe, where nothing asks for more
PREDICTED = 8  # those at its end, whose log-probs are compared
MOST = 8192  # tokens of a window that a probe goes past: masks have the square of that, and transformers makes some


@dataclass(frozen=True)
class Probe:
    """A sequence of which the last tokens are predicted."""

    prompt: list[int]
    completion: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Asked:
    """One call of attention, by a layer."""

    layer: int | None
    heads: int
    """Of keys and values."""
    channels: tuple[int, int]
    """Of a key, and of a value."""


@dataclass(frozen=True)
class _Asking:
    """What layers are asked about, and what they answered."""

    longest: int
    calls: list[Asked] = field(default_factory=list)


def probes(config: PretrainedConfig, longest: int, rows: int) -> tuple[Probe, Probe]:
    """A long sequence and a short one, for a run whose sequences have at most `longest` of `rows` different tokens.

    The long one goes past every window, chunk or block that a sequence of the run can go past, and no further than
    those sequences do: what lies beyond changes nothing in them. So all that is tried costs some forwards of one
    sequence like those that a step trains on by the hundred, on a CPU as well; with a window of 4,096 and a 1.7B model
    each is 14 TFLOP.
    """
    longest = max(2, longest)  # a token, and one that it predicts
    reached = max((size for size in _spans(config.get_text_config().to_dict()) if size < min(longest, MOST)), default=0)
    length = min(longest, max(SHORT, reached + 2 * PREDICTED))
    ids = [number * 7919 % (rows - 1) for number in range(length + 5)]  # spread over the vocabulary
    cut = max(1, length - PREDICTED)
    short = ids[length : length + min(5, longest)]
    return Probe(ids[:cut], ids[cut:length]), Probe(short[:1], short[1:])


def _spans(found: object, name: str = "") -> Iterator[int]:
    """Whole numbers in a config that are, by their names, as many tokens as something sees at once."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _spans(value, str(key))
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _spans(value, name)
    elif isinstance(found, int) and _SPAN.search(name) and not _COUNT.search(name):
        yield found


def examine(model: PreTrainedModel, longest: int, both: tuple[Probe, Probe]) -> list[Asked]:
    """What its layers ask of attention. Refuses, in a sentence, a model in which packed sequences of up to `longest`
    tokens would not be what each is alone."""
    family, limit = model.config.get_text_config().model_type, rope_limit(model.config)
    if limit is not None and longest > limit:  # and a sample changes its own past as it grows beyond it
        raise UserError(
            f"the rope of `{family}` changes for all sequences of a batch once one has more than {limit:,} tokens, "
            f"and {longest:,} may come: lower `rollout.max_prompt_tokens` + `rollout.max_new_tokens` "
            f"(`max_length` of `ebbtide serve`) to {limit:,}"
        )
    long, short = (one.tokens for one in both)
    asking = _Asking(longest)
    with torch.no_grad(), refusing(lambda why: not_packed(model, why)), warnings.catch_warnings():
        # The first backward of a process: torch warns that its thread has no CUDA context yet, and makes one.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        with attention(model, PROBED):
            _forward(model, [long], asking=asking)
        with attention(model, PACKED), _kept_apart(model, len(short)):
            _forward(model, [short, short[::-1]])
    return asking.calls


def own_logprobs(model: PreTrainedModel, implementation: str, probe: Probe) -> Tensor:
    """[completion]: by the model's own forward, of this sequence alone."""
    ids, count = torch.tensor([probe.tokens], device=model.device), len(probe.completion)
    # Logits of a long probe are gigabytes with a large vocabulary; most families can leave out all but the last few.
    few = {"logits_to_keep": count + 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    with torch.no_grad(), attention(model, implementation):
        logits = model(ids, use_cache=False, **few).logits[0, -count - 1 : -1].float()
    return log_softmax(logits, -1).gather(-1, ids[0, -count:, None])[:, 0]


@contextmanager
def refusing(refusal: Callable[[str], UserError]) -> Iterator[None]:
    """Around the first passes of a model, whose code is foreign: what it raises says that it cannot be run like this.
    Nothing goes on after it."""
    try:
        yield
    except torch.OutOfMemoryError:  # of the machine, not of the model
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def not_packed(model: PreTrainedModel, why: str) -> UserError:
    family = model.config.get_text_config().model_type
    return UserError(f"`{family}` cannot be run on packed sequences ({why}): choose another model")


def not_finite(block: nn.Module) -> UserError:
    broken = [name for name, weight in block.named_parameters() if not weight.isfinite().all()]
    what = f"its weight {broken[0]} has some" if broken else "and none of its weights has any: look at the config.json"
    return UserError(
        f"a {type(block).__name__} of the model computes numbers that are not finite, {what}: the model is damaged, or has diverged "
        "when it was trained. Get it again"
    )


def _forward(model: PreTrainedModel, sequences: Sequence[Sequence[int]], **named: Any) -> None:
    """Through the decoder, packed as in training."""

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
    asking: _Asking | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Packed attention of one sequence; but its layers have the masks that they want, which are compared with what
    packed attention would show them."""
    window = window_asked(module, None, {name: each for name, each in named.items() if name not in _COMPUTED})
    place = torch.arange(query.shape[2], device=query.device)
    seen = place[:, None] >= place  # [T, T]
    if window is not None:
        seen &= place[:, None] - window < place
    if asking is not None and attention_mask is not None:
        span = getattr(attention_mask, "span", None)
        beyond = span is not None and len(place) <= span < asking.longest  # a window too far away for this probe
        if (beyond and span != window) or not _shows(attention_mask, seen):
            computed = "the causal one" if window is None else f"the causal one of {window} tokens"
            raise unsupported(module, f"wants a mask other than {computed}")
    if asking is not None:
        asking.calls.append(Asked(getattr(module, "layer_idx", None), key.shape[1], (key.shape[3], value.shape[3])))
    return packed_attention(module, query, key, value, None, **named)


def _shows(mask: object, seen: Tensor) -> bool:
    """Whether a mask, of booleans or of what is added to scores, lets each token see just these."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != seen.shape:
        return False
    shown = mask if mask.dtype == torch.bool else mask == 0
    return bool((shown == seen).all())


def _whole_mask(local_size: int | None = None, **wanted: Any) -> Tensor:
    """What a layer wants its tokens to see, cell by cell, also where it would be left to attention; its `span` is the
    window or chunk that it was made for."""
    mask: Tensor = sdpa_mask(**{**wanted, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    mask.span = local_size  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBED, _probed_attention)
AttentionMaskInterface.register(PROBED, _whole_mask)


@contextmanager
def _kept_apart(model: PreTrainedModel, first: int) -> Iterator[None]:
    """Inside this block each layer is also run by itself, on a pack of two sequences of so many tokens: nothing that
    comes out of one may have a gradient in the other. That is zero to the bit in any type, whatever the weights are;
    that of a convolution, a state or attention of its own that runs on is not."""
    layers = model.config.get_text_config().num_hidden_layers
    lists = (found for found in decoder(model).modules() if isinstance(found, nn.ModuleList))
    blocks = next((found for found in lists if len(found) == layers), None)
    if blocks is None:
        raise not_packed(model, f"it has no list of its {layers} layers")
    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            why = (
                f"in layer {number}, a {type(block).__name__}, tokens see those of other sequences: "
                "by a state, a convolution or attention of its own"
            )
            # Its hook comes after those that bring a block's weights, where ranks have shared them out.
            check = partial(_check_apart, first, not_packed(model, why))
            hooks.enter_context(block.register_forward_pre_hook(check, with_kwargs=True))
        yield


def _check_apart(first: int, mixed: UserError, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    def by_token(some: object) -> bool:
        return isinstance(some, Tensor) and some.is_floating_point() and some.dim() > 1 and some.shape[-2] == 2 * first

    with torch.enable_grad():
        inputs = {id(some): some.detach().requires_grad_() for some in (*given, *named.values()) if by_token(some)}
        # Copies, since a block may add to its input in place.
        again = {place: some.clone() for place, some in inputs.items()}
        by_name = {name: again.get(id(some), some) for name, some in named.items()}
        found = block.forward(*(again.get(id(some), some) for some in given), **by_name)
    several = found if isinstance(found, tuple) else (found,)
    outputs = [some for some in several if by_token(some) and some.requires_grad]
    for others in (slice(first), slice(first, None)):  # of what comes out of one sequence, gradients in the other
        weights = []
        for some in outputs:  # any numbers that do not cancel out
            weight = torch.arange(some.numel(), device=some.device).sin().view_as(some).to(some.dtype)
            weight[..., others, :] = 0
            weights.append(weight)
        gradients = torch.autograd.grad(outputs, list(inputs.values()), weights, retain_graph=True, allow_unused=True)
        if any(some is not None and not some.isfinite().all() for some in (*outputs, *gradients)):
            raise not_finite(block)
        if not outputs or any(gradient is not None and gradient[..., others, :].any() for gradient in gradients):
            raise mixed
