"""How long the parts of a step take: products by their operations, the rest by the bytes that eager kernels read and write, and the host where it is slower than both.

The constants are fitted to an H200 (benchmarks/plan.py, stage `fit`); other machines differ by their rates.
"""

from __future__ import annotations

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.optim.sizes import grad_bytes, low_bytes, moment_bytes
from ebbtide.planner.machine import Rates
from ebbtide.planner.saved import Choice, held, whole_block
from ebbtide.planner.shape import Shape
from ebbtide.planner.work import Part, Work

ATTENTION = 0.45  # of the rate of a large product
# Bytes that small kernels read and write, times what the arithmetic itself would: of a forward, and of a backward.
FORWARD_BYTES, BACKWARD_BYTES = 1.6, 3.4
STARTS = 0.37e-3  # seconds a block and forward, twice that a backward: kernels that are short beside their own start
OPS = {
    "forward": 216,
    "keep": 640,
    "local": 1240,
    "whole": 1320,
}  # that the host does for a block: a forward alone; with its backward, by what is made again
LEAVING_OPS = 10.0  # for each tensor whose gradient leaves for the CPU in a backward
# A decoding pass, in units of what each rate alone would give.
DECODE_LAYER, DECODE_WEIGHTS, DECODE_CACHE, DECODE_PRODUCTS = 47e-6, 0.89, 1.25, 1.24
DECODE_EXPERTS = 112e-6  # seconds more a block, for sorting tokens by expert and back
# Operations of the host before an optimizer step on the device begins: always, and for each tensor.
STEP_OPS, TENSOR_OPS = 420, 2.0
STEPPED = 0.92  # of the rate of a copy, where the device reads and writes all that a step touches
GATHERED = 5.1  # times the rate of a short step: compute waits so long where a later micro-batch's gradients add up on the CPU
CPU_STARTS = 0.004  # seconds before a step on the CPU and after it
STREAMED = 0.87  # of the link, where both directions are busy
BOTH = 0.85  # of their sum, where half is streamed while the CPU steps the rest


class Speed:
    def __init__(self, shape: Shape, rates: Rates, each: int, stepped: int | None = None, here: int = 1, *, groups: bool) -> None:
        """`stepped`: parameters that this rank steps, if not all. `here`: ranks that share the host's cores and its memory. `groups`: the device multiplies by many experts at once (`Machine.groups`)."""
        self._shape, self._rates, self._each = shape, rates, each
        self._stepped, self._here = stepped or shape.parameters, here
        self._captures = not shape.experts or (groups and each == 2)

    def forward(self, tokens: float, length: float) -> float:
        """Of all blocks, without a head."""
        device = self._products(tokens, length) + FORWARD_BYTES * self._small(tokens) + self._shape.layers * STARTS
        return _side_by_side(device, self._host("forward"))

    def _products(self, tokens: float, length: float) -> float:
        shape = self._shape
        products = 2 * shape.layers * shape.used_by_a_token * tokens / self._rates.matmul
        return products + 2 * shape.layers * shape.queries * length * tokens / (ATTENTION * self._rates.matmul)

    def _small(self, tokens: float) -> float:
        """Norms, rotations, activations and sums, kernel by kernel."""
        shape = self._shape
        rotated = shape.queries + shape.keys
        norms = 36 * (2 * shape.hidden + rotated * shape.normed_heads)
        wide = shape.mlp * max(1, shape.experts_per_token)
        sparse = 50 * shape.hidden * shape.experts_per_token + 40 * shape.experts
        each = norms + 24 * rotated + 12 * shape.hidden + 10 * wide + sparse
        return shape.layers * each * tokens / self._rates.copy

    def _host(self, kind: str) -> float:
        return self._shape.layers * OPS[kind] / self._rates.host_op

    def head(self, predicted: float, products: int) -> float:
        """So many products with the output head; each chunk of logits is read and written around it."""
        shape = self._shape
        product = 2 * shape.embedding * predicted / self._rates.matmul
        return products * (1.1 * product + 2 * self._each * shape.vocabulary * predicted / self._rates.copy)

    def logprobs(self, part: Part, length: float) -> float:
        """Of one micro-batch, without gradient."""
        return self.forward(part.tokens, length) + self.head(part.predicted, 1)

    def update(self, part: Part, length: float, choice: Choice, keep_last: int, leaving: float = 0.0) -> tuple[float, float]:
        """(seconds of a forward and backward, of which compute waits for the link). `leaving`: the share of gradients that go to the CPU."""
        products, small, starts = self._products(part.tokens, length), self._small(part.tokens), self._shape.layers * STARTS
        forward = products + FORWARD_BYTES * small + starts
        kind, again = "keep", 0.0
        if whole_block(self._shape, choice):
            kind, again = "whole", forward
        elif choice.recompute or choice.offload:
            kind, again = "local", 0.5 * small * len(choice.recompute) / 4
        device = forward + 2 * products + BACKWARD_BYTES * small + 2 * starts + again + self.head(part.predicted, 4)
        parked = held(self._shape, self._each, choice, keep_last).parked * part.tokens / self._rates.link_out
        waits = max(0.0, parked - forward)
        host = self._host(kind) + leaving * self._shape.tensors * LEAVING_OPS / self._rates.host_op
        return _side_by_side(device, host) + waits, waits

    def step(self, config: OptimizerConfig) -> tuple[float, float]:
        """(seconds of an optimizer step, of which compute waits for the link)."""
        rates, parameters = self._rates, self._stepped
        on_cpu = config.on_cpu * parameters
        elsewhere = parameters - on_cpu
        state = low_bytes(self._each) + 2 * moment_bytes(config)
        touched = 2 * (self._each + state + grad_bytes(config, self._each))  # read and written; of gradients, read for their norm and again
        handed_over = STEP_OPS + (1 - config.on_cpu) * self._shape.tensors * TENSOR_OPS
        on_device, waits = elsewhere * touched / (STEPPED * rates.copy) + handed_over / rates.host_op, 0.0
        if config.place == "streamed":
            streamed = elsewhere * state / (STREAMED * min(rates.link_out, rates.link_in))
            waits = max(0.0, streamed - on_device)
            on_device += waits
        with_cpu = self._here * on_cpu / rates.cpu_adam + (CPU_STARTS if on_cpu else 0.0)
        if config.place == "streamed" and on_cpu:  # both read and write the host's memory
            return BOTH * (on_device + with_cpu), BOTH * waits
        return max(on_device, with_cpu), waits

    def gathering(self, config: OptimizerConfig, micro_batches: int) -> float:
        """Seconds more that the forwards and backwards of an update take where gradients add up on the host."""
        return (micro_batches - 1) * self._here * config.on_cpu * self._stepped / (GATHERED * self._rates.cpu_adam)

    def generate(self, work: Work, rows: float, *, captured: bool = True) -> float:
        """All samples of a step, `rows` of them in the batch while there are enough; prompts read once a group. `captured`: decoding may be, as a graph."""
        shape, rates = self._shape, self._rates
        passes = work.decode_passes(rows)
        rows = work.sequences * work.new / passes
        kept = shape.kept_by_a_token * self._each
        cache = rows * kept * (work.new / 2 + work.prompt / work.samples) / rates.copy
        used = shape.layers * shape.used_by_a_token + shape.embedding
        read = self._each * (shape.parameters - (0 if shape.tied else shape.embedding)) / rates.copy
        products = 2 * used * rows / rates.matmul
        starts = shape.layers * (DECODE_LAYER + (DECODE_EXPERTS if shape.experts else 0.0))
        decoding = starts + DECODE_WEIGHTS * read + DECODE_CACHE * cache + DECODE_PRODUCTS * products
        if not (captured and self._captures):  # no graphs: the host starts every kernel
            decoding = _side_by_side(decoding, self._host("forward"))
        prompts = self.forward(work.prompts * work.prompt, work.prompt)
        return passes * decoding + prompts


def _side_by_side(device: float, host: float) -> float:
    """Where the host hands work to the device that takes about as long as the handing over, each waits for the other at times."""
    return float((device**4 + host**4) ** 0.25)
