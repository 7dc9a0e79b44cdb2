"""Predicts the seconds of the parts of a step: matmuls by their operations, the rest by the bytes that eager kernels
read and write, and the host if it is slower than both.

The constants are fitted to an H200 (benchmarks/plan.py, stage `fit`); other machines differ by their rates.
"""

from __future__ import annotations

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.model.shape import Shape
from ebbtide.optim.costs import grad_bytes, low_bytes, moment_bytes
from ebbtide.planner.workload import MicroBatchSize, Workload
from ebbtide.policy.activation_costs import ActivationPolicy, activation_bytes, recomputes_whole_block
from ebbtide.system.machine import Rates

ATTENTION = 0.45  # Rate of attention, as a fraction of the rate of a large matmul.
# Bytes that small kernels read and write in a forward and in a backward, as a multiple of what the arithmetic needs.
FORWARD_BYTES, BACKWARD_BYTES = 1.6, 3.4
STARTS = 0.37e-3  # Seconds per block and forward, twice that in a backward, for launches of short kernels.
# Operations of the host per block: for a forward alone, and for a forward with its backward, by what is recomputed.
OPS = {"forward": 216, "keep": 640, "local": 1240, "whole": 1320}
LEAVING_OPS = 10.0  # Operations of the host per tensor whose gradient is sent to the CPU in a backward.
# Seconds per layer of a decode step, and multiples of what the rates alone would give for weights, KV cache and
# matmuls.
DECODE_LAYER, DECODE_WEIGHTS, DECODE_CACHE, DECODE_MATMULS = 47e-6, 0.89, 1.25, 1.24
DECODE_EXPERTS = 112e-6  # Additional seconds per block of a decode step, for sorting tokens by expert and back.
# Operations of the host before an optimizer step on the device starts: always, and per tensor.
STEP_OPS, TENSOR_OPS = 420, 2.0
STEP_RATE = 0.92  # Rate at which an optimizer step on the device reads and writes, as a fraction of the copy rate.
# Rate at which later micro-batches' gradients are accumulated on the CPU while compute waits, as a multiple of the rate
# of a CPU step.
HOST_ACCUMULATION_RATE = 5.1
CPU_STARTS = 0.004  # Seconds before and after a step on the CPU.
STREAM_RATE = 0.87  # Fraction of the host link's rate when both directions are busy.
STREAM_AND_CPU = 0.85  # Fraction of the summed seconds when half is streamed while the CPU steps the rest.


class Speed:
    """Predicts seconds for one shape and one machine's rates."""

    def __init__(
        self, shape: Shape, rates: Rates, itemsize: int, stepped: int | None = None, here: int = 1, *, groups: bool
    ) -> None:
        """`itemsize`: bytes per number. `stepped`: parameters that this rank steps, if not all. `here`: ranks that
        share the host's cores and memory. `groups`: whether the device has grouped matmuls for experts
        (`Machine.has_grouped_matmul`)."""
        self._shape, self._rates, self._itemsize = shape, rates, itemsize
        self._stepped, self._here = stepped or shape.parameters, here
        self._captures = not shape.experts or (groups and itemsize == 2)

    def forward(self, tokens: float, length: float) -> float:
        """Seconds of a forward through all blocks, without the output head. `length`: tokens per sequence."""
        device = self._matmuls(tokens, length) + FORWARD_BYTES * self._small(tokens) + self._shape.layers * STARTS
        return _overlap(device, self._host("forward"))

    def _matmuls(self, tokens: float, length: float) -> float:
        """Seconds of a forward's matmuls and attention."""
        shape = self._shape
        linear = 2 * shape.layers * shape.matmul_parameters_per_token * tokens / self._rates.matmul
        return linear + 2 * shape.layers * shape.queries * length * tokens / (ATTENTION * self._rates.matmul)

    def _small(self, tokens: float) -> float:
        """Seconds of a forward's small kernels: norms, rotary embeddings, activation functions and sums."""
        shape = self._shape
        rotated = shape.queries + shape.keys
        norms = 36 * (2 * shape.hidden + rotated * shape.has_qk_norm)
        wide = shape.mlp * max(1, shape.experts_per_token)
        sparse = 50 * shape.hidden * shape.experts_per_token + 40 * shape.experts
        each = norms + 24 * rotated + 12 * shape.hidden + 10 * wide + sparse
        return shape.layers * each * tokens / self._rates.copy

    def _host(self, kind: str) -> float:
        """Seconds in which the host launches the kernels of all blocks."""
        return self._shape.layers * OPS[kind] / self._rates.host_op

    def head(self, predicted: float, matmuls: int) -> float:
        """Seconds of so many matmuls of the output head; each chunk of logits is read and written around it."""
        shape = self._shape
        matmul = 2 * shape.embedding * predicted / self._rates.matmul
        return matmuls * (1.1 * matmul + 2 * self._itemsize * shape.vocabulary * predicted / self._rates.copy)

    def logprobs(self, part: MicroBatchSize, length: float) -> float:
        """Seconds of the log-probs of one micro-batch, without gradient."""
        return self.forward(part.tokens, length) + self.head(part.completion_tokens, 1)

    def update(
        self, part: MicroBatchSize, length: float, choice: ActivationPolicy, keep_last: int, leaving: float = 0.0
    ) -> tuple[float, float]:
        """(seconds of a forward and backward, exposed seconds among them in which compute waits for the host link).
        `leaving`: the fraction of gradients that go to the CPU."""
        matmuls, small, starts = (
            self._matmuls(part.tokens, length),
            self._small(part.tokens),
            self._shape.layers * STARTS,
        )
        forward = matmuls + FORWARD_BYTES * small + starts
        kind, recompute = "keep", 0.0
        if recomputes_whole_block(self._shape, choice):
            kind, recompute = "whole", forward
        elif choice.recompute or choice.offload:
            kind, recompute = "local", 0.5 * small * len(choice.recompute) / 4
        device = (
            forward
            + 2 * matmuls
            + BACKWARD_BYTES * small
            + 2 * starts
            + recompute
            + self.head(part.completion_tokens, 4)
        )
        offload = (
            activation_bytes(self._shape, self._itemsize, choice, keep_last).offloaded
            * part.tokens
            / self._rates.link_out
        )
        exposed = max(0.0, offload - forward)
        host = self._host(kind) + leaving * self._shape.tensor_count * LEAVING_OPS / self._rates.host_op
        return _overlap(device, host) + exposed, exposed

    def step(self, config: OptimizerConfig) -> tuple[float, float]:
        """(seconds of an optimizer step, exposed seconds among them in which compute waits for the host link)."""
        rates, parameters = self._rates, self._stepped
        cpu_parameters = config.cpu_share * parameters
        gpu_parameters = parameters - cpu_parameters
        state = low_bytes(self._itemsize) + 2 * moment_bytes(config)
        # Weights and state are read and written; gradients are read twice, once for their norm.
        touched = 2 * (self._itemsize + state + grad_bytes(config, self._itemsize))
        launches = STEP_OPS + (1 - config.cpu_share) * self._shape.tensor_count * TENSOR_OPS
        on_device, exposed = gpu_parameters * touched / (STEP_RATE * rates.copy) + launches / rates.host_op, 0.0
        if config.place == "streamed":
            streamed = gpu_parameters * state / (STREAM_RATE * min(rates.link_out, rates.link_in))
            exposed = max(0.0, streamed - on_device)
            on_device += exposed
        with_cpu = self._here * cpu_parameters / rates.cpu_adam + (CPU_STARTS if cpu_parameters else 0.0)
        if config.place == "streamed" and cpu_parameters:  # Both use the bandwidth of the host's memory.
            return STREAM_AND_CPU * (on_device + with_cpu), STREAM_AND_CPU * exposed
        return max(on_device, with_cpu), exposed

    def host_accumulation(self, config: OptimizerConfig, micro_batches: int) -> float:
        """Additional seconds of an update's forwards and backwards if gradients are accumulated on the host."""
        accumulated = (micro_batches - 1) * self._here * config.cpu_share * self._stepped
        return accumulated / (HOST_ACCUMULATION_RATE * self._rates.cpu_adam)

    def generate(self, work: Workload, rows: float, *, captured: bool = True) -> float:
        """Seconds of generating all samples of a step, with `rows` of them in the batch while there are enough. Each
        prompt is prefilled once per group. `captured`: whether CUDA graphs may be used for decoding."""
        shape, rates = self._shape, self._rates
        passes = work.decode_passes(rows)
        rows = work.sequences * work.new_tokens / passes
        kv_bytes = shape.kv_numbers_per_token * self._itemsize
        cache = rows * kv_bytes * (work.new_tokens / 2 + work.prompt_tokens / work.samples) / rates.copy
        used = shape.layers * shape.matmul_parameters_per_token + shape.embedding
        weights = self._itemsize * (shape.parameters - (0 if shape.tied else shape.embedding)) / rates.copy
        matmuls = 2 * used * rows / rates.matmul
        starts = shape.layers * (DECODE_LAYER + (DECODE_EXPERTS if shape.experts else 0.0))
        decode = starts + DECODE_WEIGHTS * weights + DECODE_CACHE * cache + DECODE_MATMULS * matmuls
        if not (captured and self._captures):  # Without CUDA graphs the host launches every kernel.
            decode = _overlap(decode, self._host("forward"))
        prefill = self.forward(work.prompts * work.prompt_tokens, work.prompt_tokens)
        return passes * decode + prefill


def _overlap(device: float, host: float) -> float:
    """Seconds of work that the host launches while the device runs it: about the longer of the two, and more if they
    are about equal, because each then waits for the other at times."""
    return float((device**4 + host**4) ** 0.25)
