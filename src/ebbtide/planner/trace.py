"""Traces a model that no formula describes: what its forward and backward save, compute and launch.

`model/families.py` describes families whose blocks are all alike, and a plan of those needs no torch. Any other family
is built by transformers' own class on the meta device, where tensors have sizes and no memory, and runs a forward and a
backward of a few sequences there, which takes seconds however large the model is: of a repeated pattern of blocks,
only the first ones run. Every tensor that is made is counted until it is freed, so that the bytes are those of the code
that will run. Attention is a stand-in with the memory of the kernels that a GPU has; gradients of parameters are left
out, for they are a holding of their own.

What a trace cannot know: temporary copies as large as a parameter, and kernels of other packages, for which stand-ins
run (traced_kernels.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbtide.model.load import decoder
from ebbtide.model.traced_shape import TracedPass, Work
from ebbtide.policy.attention import FUNCTIONS, requested_kind, scaled_by_position, use_attention
from ebbtide.policy.packed_attention import MOST_FLASH_CHANNELS
from ebbtide.system.torch_internals import TorchDispatchMode, is_matmul_op, op_mutates, storage_id, tree_leaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRACED = "ebbtide_traced"
T = TypeVar("T")

FEWEST_TOKENS = 2048  # of a trace: so many that what does not grow with them is little


class Counter(TorchDispatchMode):
    """Counts the bytes of tensors on the meta device while they exist, and the work of all operations."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._not_counted = {_sizes(parameter) for parameter in parameters}
        self._known = {storage_id(parameter) for parameter in parameters}
        self.live = self.peak = 0
        self.flops = self.touched = 0.0
        self.kernels = 0

    def restart_peak(self) -> None:
        self.peak = self.live

    def restart_work(self) -> None:
        self.flops, self.touched, self.kernels = 0.0, 0.0, 0

    @property
    def work(self) -> Work:
        """What was computed since the last restart, of all tokens."""
        return Work(self.flops, self.touched, self.kernels)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type == "meta"]
        new = [tensor for tensor in made if self._add(tensor)]
        if new or op_mutates(func):  # others are views
            self.kernels += 1
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if is_matmul_op(func):
                left, right = given[1:3] if func is torch.ops.aten.addmm.default else given[:2]
                self.flops += 2 * left.numel() * right.shape[-1]
            else:
                self.touched += sum(tensor.nbytes for tensor in (*given, *made))
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, tensor: Tensor) -> bool:
        """Counts a tensor whose storage is new."""
        if (known := storage_id(tensor)) in self._known:
            return False
        storage = tensor.untyped_storage()
        size = 0 if _sizes(tensor) in self._not_counted else storage.nbytes()
        self._known.add(known)
        self.live += size
        weakref.finalize(storage, self._remove, known, size).atexit = False
        return True

    def _remove(self, known: int, size: int) -> None:
        self._known.discard(known)
        self.live -= size


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor in order: a gradient may be made transposed."""
    return tuple(sorted(size for size in tensor.shape if size > 1))


class _Attention(torch.autograd.Function):
    """Saves what flash attention saves: queries, keys, values, the result, and a sum for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, mixed, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@dataclass
class AttentionLog:
    """What the layers of one forward want of attention: the width of the queries, and how many tokens one sees at
    most."""

    calls: list[tuple[int, int | None]] = field(default_factory=list)


def traced_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, channels]
    key: Tensor,
    value: Tensor,  # [1, kv heads, T, value channels]
    attention_mask: None,
    scaling: float | None = None,
    *,
    attention_log: AttentionLog | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **requested: Any,
) -> tuple[Tensor, None]:
    """The memory of attention: [1, T, heads, value channels]."""
    kind = requested_kind(module, attention_mask, requested)
    heads, channels, tokens = query.shape[1], query.shape[3], query.shape[2]
    if attention_log is not None:
        attention_log.calls.append((heads * (channels + value.shape[3]) // 2, kind.window or kind.chunk))
    query = scaled_by_position(module, query, lambda: torch.zeros(tokens, device=query.device))
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    wide = channels - v.shape[2]
    if wide > 0:
        v = nn.functional.pad(v, (0, wide))
    if channels > MOST_FLASH_CHANNELS:  # Sequences are padded, and keys and values are repeated for all heads.
        q, k, v = (states.repeat_interleave(heads // states.shape[1], 1) for states in (q.clone(), k, v))
    mixed: Tensor = _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return mixed[..., : value.shape[3]].unsqueeze(0), None


FUNCTIONS[TRACED] = traced_attention


@dataclass(frozen=True)
class Trace:
    """What the passes of a model take."""

    forward: Work
    in_forward: int
    keep: TracedPass
    recompute: TracedPass
    inputs: tuple[int, ...]
    attention: tuple[tuple[int, int | None], ...]


class Tracer:
    """Runs passes of one model on the meta device, over packed sequences of one length. It is left with the blocks that
    run alone."""

    def __init__(self, model: PreTrainedModel, blocks: nn.ModuleList, length: int, *, shares_keys: bool) -> None:
        """`shares_keys`: whether blocks read what other ones computed, so that all have to run."""
        self._model, self._length = model, length
        self._parameters = list(model.parameters())
        widths = {size for parameter in self._parameters for size in parameter.shape}
        sequences = -(-FEWEST_TOKENS // length)
        while length * sequences in widths:  # An activation must not have the sizes of a parameter.
            sequences += 1
        self._tokens = length * sequences
        self._stands_for = list(range(len(blocks))) if shares_keys else pattern([_kind(block) for block in blocks])
        """For each block of the model, the one that runs in its place."""
        del blocks[max(self._stands_for) + 1 :]
        self._blocks: list[nn.Module] = list(blocks)

    def trace(self) -> Trace:
        """Traces a forward without gradient, and a forward and backward that keep, and that recompute all blocks."""
        counter, log, marks = Counter(self._parameters), AttentionLog(), list[tuple[Work, int]]()
        with use_attention(self._model, TRACED), ExitStack() as hooks:

            def mark(*_: Any) -> None:
                marks.append((counter.work, len(log.calls)))

            for block in self._blocks:
                hooks.callback(block.register_forward_pre_hook(mark).remove)
            hooks.callback(self._blocks[-1].register_forward_hook(mark).remove)
            with counter, torch.no_grad():
                self._run(log)
        ran = counter.work
        whole = self._extended([work for work, _ in marks], ran)
        calls = [log.calls[first:last] for (_, first), (_, last) in pairwise(marks)]
        with use_attention(self._model, TRACED):
            keep, inputs = self._train(ran, whole)
            with self._recomputing():
                recompute, _ = self._train(ran, whole)
        return Trace(
            _per_token(whole, self._tokens),
            self._by_token(counter.peak),
            keep,
            recompute,
            self._of_all(inputs),
            tuple(call for some in self._of_all(calls) for call in some),
        )

    def _by_token(self, size: float) -> int:
        return round(size / self._tokens)

    def _of_all(self, some: Sequence[T]) -> tuple[T, ...]:
        """What each of the model's blocks has, of what the blocks have that ran."""
        return tuple(some[number] for number in self._stands_for)

    def _extended(self, marks: Sequence[Work], ran: Work) -> Work:
        """The work of all blocks, of what `ran`: `marks` is what was done before each block, and after the last."""
        blocks = self._of_all([_less(after, before) for before, after in pairwise(marks)])
        parts = [marks[0], *blocks, _less(ran, marks[-1])]
        return Work(
            sum(one.flops for one in parts), sum(one.touched for one in parts), sum(one.kernels for one in parts)
        )

    def _run(self, log: AttentionLog | None = None) -> Tensor:
        """The last hidden states of a forward."""
        tokens = torch.zeros((1, self._tokens), dtype=torch.long, device="meta")
        starts = torch.arange(0, self._tokens + 1, self._length, dtype=torch.int32)  # The host reads the lengths.
        named = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "attention_log": log}
        longest = {"max_length_q": self._length, "max_length_k": self._length}
        found = decoder(self._model)(
            input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False, **named, **longest
        )
        hidden: Tensor = found.last_hidden_state
        return hidden

    def _train(self, ran: Work, whole: Work) -> tuple[TracedPass, Sequence[int]]:
        """(what a forward and its backward have on the device, the bytes of each block's input). `ran`: the work of a
        forward of the blocks that run, and of all."""
        counter, blocks = Counter(self._parameters), self._blocks
        begins: list[int] = []  # live bytes at the begin of each block, and of what comes after the last
        peaks: list[int] = []  # of the backward, from its start to that of the last block, of the first, and to the end
        inputs: list[int] = []

        def begin(module: nn.Module, args: Any, named: Any) -> None:
            if len(inputs) < len(blocks):  # It runs once more where it is recomputed.
                begins.append(counter.live)
                inputs.append(self._by_token(_first_tensor((args, named)).nbytes))

        def watch(number: int, module: nn.Module, args: Any, output: Any) -> None:
            if len(inputs) == number + 1 <= len(blocks) and not peaks:
                _first_tensor(output).register_hook(cut)

        def after_blocks(module: nn.Module, args: Any) -> None:
            if len(inputs) == len(blocks) == len(begins):
                begins.append(counter.live)

        def cut(grad: Tensor) -> None:
            peaks.append(counter.peak)
            counter.restart_peak()

        with ExitStack() as hooks:
            for block in blocks:
                hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
            for number in {0, len(blocks) - 1}:
                hooks.callback(blocks[number].register_forward_hook(partial(watch, number)).remove)
            for module in decoder(self._model).children():
                if not isinstance(module, nn.ModuleList):
                    hooks.callback(module.register_forward_pre_hook(after_blocks).remove)
            with counter:
                hidden = self._run()
                end = counter.live
                if len(begins) == len(blocks):
                    begins.append(end)
                counter.restart_work()
                counter.restart_peak()
                hidden.backward(torch.empty_like(hidden))
                peaks.append(counter.peak)
        for parameter in self._parameters:
            parameter.grad = None
        # A run holds neither the decoder's output nor its gradient any more when the backward is in the blocks.
        in_norm, *in_blocks = peaks[0], *(peak - 2 * hidden.nbytes for peak in peaks[1:])
        all_saved, grad = begins[-1], hidden.nbytes
        saved = [self._by_token(last - first) for first, last in pairwise(begins)]
        done = counter.work
        backward = Work(
            done.flops * whole.flops / ran.flops,
            done.touched * whole.touched / ran.touched,
            round(done.kernels * whole.kernels / ran.kernels),
        )
        found = TracedPass(
            saved=(saved[0], *self._of_all(saved)[1:]),
            outside=self._by_token(begins[0]),
            norm_saved=self._by_token(end - all_saved),
            in_final_norm=self._by_token(in_norm - all_saved),
            in_backward=self._by_token(max(in_blocks) - all_saved - grad),
            in_first=self._by_token(in_blocks[-1]),
            backward=_per_token(backward, self._tokens),
        )
        return found, inputs

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Inside this context all blocks are recomputed from their inputs."""
        with ExitStack() as undo:
            for block in self._blocks:
                before: Callable[..., Any] | None = block.__dict__.get("forward")
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
                undo.callback(_set_forward, block, before)
            yield


def pattern(kinds: Sequence[object]) -> list[int]:
    """For each of the blocks of these kinds, the number of one among the first that stands for it: as few first ones as
    have each kind twice, where there are two, and end as all do. The first block is not like others of its kind: its
    input is held by the decoder."""
    for count in range(1, len(kinds)):
        first = kinds[:count]
        enough = all(first.count(kind) >= min(2, kinds.count(kind)) for kind in set(kinds))
        if enough and first[-2:] == kinds[-2:]:
            last = {kind: number for number, kind in enumerate(first)}
            return [number if number < count else last[kind] for number, kind in enumerate(kinds)]
    return list(range(len(kinds)))


def _kind(block: nn.Module) -> object:
    """What makes two blocks compute alike: their modules, with their numbers and flags, and parameters."""
    modules = [(path, type(module), *_settings(module)) for path, module in block.named_modules()]
    return tuple(modules), tuple((name, one.shape) for name, one in block.named_parameters())


def _settings(module: nn.Module) -> tuple[object, ...]:
    """The numbers, flags and words of a module, but for those that say where it is in the model."""
    found = vars(module).items()
    return tuple(
        (name, value) for name, value in found if isinstance(value, int | float | str) and "layer_i" not in name
    )


def _less(work: Work, other: Work) -> Work:
    return Work(work.flops - other.flops, work.touched - other.touched, work.kernels - other.kernels)


def _per_token(work: Work, tokens: int) -> Work:
    return Work(work.flops / tokens, work.touched / tokens, work.kernels)


def _set_forward(block: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del block.__dict__["forward"]
    else:
        block.forward = forward


def _first_tensor(given: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
