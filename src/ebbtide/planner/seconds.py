"""How long the parts of a step take: products by their operations, the rest by the bytes that eager kernels read and write, and the host where it is slower than both.

The constants are fitted to an H200 (benchmarks/plan.py, stage `fit`); other machines differ by their rates.
"""

from __future__ import annotations

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.optim.sizes import low_bytes, moment_bytes
from ebbtide.planner.machine import Rates
from ebbtide.planner.saved import Choice, held, local_names, whole_block
from ebbtide.planner.shape import Shape
from ebbtide.planner.work import Work

# Of the rate of a large product: what those of a block reach, and attention's.
BLOCK_PRODUCTS, ATTENTION = 0.92, 0.45
SMALL_PRODUCTS = 0.90  # decoding: a few rows each
# Of the rate of a copy: what weights and cache are read at in decoding.
WEIGHTS_READ, CACHE_READ = 0.68, 0.80
BACKWARD_BYTES = 3.4  # read and written by a backward's small kernels, times a forward's
OPS = {
    "forward": 170,
    "keep": 640,
    "local": 1000,
    "whole": 1180,
}  # that a block hands to the device: forward alone; forward and backward, by what is made again
DECODE_LAYER = 17e-6  # seconds: starts of a block's kernels in a graph
PASS = 0.25e-3  # seconds of a decoding pass beside its blocks
DEVICE_ADAM = 75.0  # bytes a parameter, read and written
STREAMED = 0.87  # of the link, where both directions are busy


class Speed:
    def __init__(self, shape: Shape, rates: Rates, each: int) -> None:
        self._shape, self._rates, self._each = shape, rates, each

    def forward(self, tokens: float, length: float) -> float:
        """Of all blocks, without a head."""
        return max(self._products(tokens, length) + self._small(tokens), self._host("forward"))

    def _products(self, tokens: float, length: float) -> float:
        shape = self._shape
        products = 2 * shape.layers * shape.used_by_a_token * tokens / (BLOCK_PRODUCTS * self._rates.matmul)
        return products + 2 * shape.layers * shape.queries * length * tokens / (ATTENTION * self._rates.matmul)

    def _small(self, tokens: float) -> float:
        """Norms, rotations, activations and sums, kernel by kernel."""
        shape = self._shape
        rotated = shape.queries + shape.keys
        norms = 36 * (2 * shape.hidden + rotated * shape.normed_heads)
        wide = shape.mlp * max(1, shape.experts_per_token)
        sparse = 20 * shape.hidden * shape.experts_per_token + 40 * shape.experts
        each = norms + 24 * rotated + 12 * shape.hidden + 10 * wide + sparse
        return shape.layers * each * tokens / self._rates.copy

    def _host(self, kind: str) -> float:
        return self._shape.layers * OPS[kind] / self._rates.host_op

    def _head(self, predicted: float, products: int) -> float:
        """So many products with the output head; each chunk of logits is read and written around it."""
        shape = self._shape
        return products * (
            2 * shape.embedding * predicted / (BLOCK_PRODUCTS * self._rates.matmul)
            + 2 * self._each * shape.vocabulary * predicted / self._rates.copy
        )

    def logprobs(self, tokens: float, predicted: float, length: float) -> float:
        """Of one micro-batch, without gradient."""
        return self.forward(tokens, length) + self._head(predicted, 1)

    def update(self, tokens: float, predicted: float, length: float, choice: Choice, keep_last: int) -> tuple[float, float]:
        """(seconds of a forward and backward, of which compute waits for the link)."""
        products, small = self._products(tokens, length), self._small(tokens)
        kind = "keep" if not choice.recompute and not choice.offload else "whole" if whole_block(self._shape, choice) else "local"
        again = 0.0
        if kind == "whole":
            again = products + small
        elif kind == "local":
            again = 0.35 * small * len(choice.recompute & local_names(self._shape)) / 4
        device = products * 3 + small * (1 + BACKWARD_BYTES) + again + self._head(predicted, 4)
        parked = held(self._shape, self._each, choice, keep_last).parked * tokens / self._rates.link_out
        waits = max(0.0, parked - (products + small))
        return max(device, self._host(kind)) + waits, waits

    def step(self, config: OptimizerConfig, rates: Rates) -> tuple[float, float]:
        """(seconds of an optimizer step, of which compute waits for the link)."""
        parameters = self._shape.parameters
        on_cpu = config.on_cpu * parameters
        elsewhere = parameters - on_cpu
        state = low_bytes(self._each) + 2 * moment_bytes(config)
        on_device, waits = elsewhere * DEVICE_ADAM / rates.copy, 0.0
        if config.place == "streamed":
            streamed = elsewhere * state / (STREAMED * min(rates.link_out, rates.link_in))
            waits = max(0.0, streamed - on_device)
            on_device += waits
        return max(on_device, on_cpu / rates.cpu_adam) + 0.004, waits

    def generate(self, work: Work, at_once: int) -> float:
        """All samples of a step, `at_once` in the batch; prompts read once a group."""
        shape, rates = self._shape, self._rates
        turns = -(-work.sequences // at_once)
        rows = work.sequences / turns
        kept = shape.kept_by_a_token * self._each
        cache = rows * kept * (work.new / 2 + work.prompt / work.samples) / (CACHE_READ * rates.copy)
        used = shape.layers * shape.used_by_a_token + shape.embedding
        read = self._each * (shape.parameters - (0 if shape.tied else shape.embedding)) / (WEIGHTS_READ * rates.copy)
        products = 2 * used * rows / (SMALL_PRODUCTS * rates.matmul)
        decoding = shape.layers * DECODE_LAYER + PASS + cache + read + products
        if shape.experts:  # no graphs: the host starts every kernel
            decoding = max(decoding, shape.layers * OPS["forward"] / rates.host_op)
        prompts = self.forward(work.prompts * work.prompt, work.prompt)
        return turns * work.new * decoding + prompts
