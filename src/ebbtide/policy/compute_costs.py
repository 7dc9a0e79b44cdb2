"""Predicts the seconds of forwards and backwards: matmuls by their operations, the rest by the bytes that eager kernels
read and write, or fused ones, and the host if it is slower than both. Imports no torch.

The constants are fitted to an H200 (benchmarks/plan.py, stage `fit`); other machines differ by their rates.
"""

from __future__ import annotations

from ebbtide.model.quantized_sizes import dequantized_traffic
from ebbtide.model.shape import Shape
from ebbtide.model.workload import MicroBatchSize
from ebbtide.policy import fused_costs
from ebbtide.policy.activation_costs import ActivationPolicy, activation_bytes, recomputes_whole_block
from ebbtide.system.machine import Rates

ATTENTION = 0.45  # Rate of attention, as a fraction of the rate of a large matmul.
# Bytes that small kernels read and write in a forward and in a backward, as a multiple of what the arithmetic needs.
FORWARD_BYTES, BACKWARD_BYTES = 1.6, 3.4
STARTS = 0.37e-3  # Seconds per block and forward, twice that in a backward, for launches of short kernels.
# Operations of the host per block: for a forward alone, and for a forward with its backward, by what is recomputed.
OPS = {"forward": 216, "keep": 640, "local": 1240, "whole": 1320, "fused forward": 110, "fused": 366}
# In addition, for each linear layer with an adapter, and for a block whose base is quantized. Those of a forward alone
# are not fitted.
ADAPTER_OPS, QUANTIZED_OPS = {"forward": 10, "keep": 60}, {"forward": 50, "keep": 200}
FUSED_EXPERTS_OPS = {"fused forward": 140, "fused": 444}  # In addition, for a block of experts.
# The same for fused blocks: as a multiple of the bytes that their kernels read and write, and seconds per block.
FUSED_BYTES, FUSED_STARTS = 1.07, 0.035e-3
# Seconds of a block's matmuls, as a multiple of those of large ones, and of the grouped ones of experts.
FUSED_MATMULS, GROUPED_MATMULS = 1.1, 1.54
# The rate of attention beside fused blocks. It works on tiles: tokens by which a sequence is longer to it, and its
# backward as a multiple of its forward.
FUSED_ATTENTION, TILES, ATTENTION_BACKWARD = 0.335, 416, 3.4
LEAVING_OPS = 10.0  # Operations of the host per tensor whose gradient is sent to the CPU in a backward.


class Speed:
    """Predicts seconds for one shape and one machine's rates."""

    def __init__(self, shape: Shape, rates: Rates, itemsize: int) -> None:
        """`itemsize`: bytes per number."""
        self._shape, self._rates, self._itemsize = shape, rates, itemsize

    def forward(self, tokens: float, length: float) -> float:
        """Seconds of a forward through all blocks, without the output head. `length`: tokens per sequence."""
        device = self._matmuls(tokens, length) + FORWARD_BYTES * self._small(tokens) + self._shape.layers * STARTS
        return overlap(device, self.host("forward"))

    def _matmuls(self, tokens: float, length: float) -> float:
        """Seconds of a forward's matmuls and attention."""
        shape = self._shape
        linear = 2 * shape.layers * shape.matmul_parameters_per_token * tokens / self._rates.matmul
        linear += dequantized_traffic(shape) / self._rates.copy
        return linear + 2 * shape.layers * shape.queries * length * tokens / (ATTENTION * self._rates.matmul)

    def _untrained(self, tokens: float) -> float:
        """Seconds of the matmuls that a backward has for weights, and not for those that are frozen."""
        shape = self._shape
        if shape.lora is None:
            return 0.0
        return 2 * shape.layers * shape.matmul_parameters_per_token * tokens / self._rates.matmul

    def _small(self, tokens: float) -> float:
        """Seconds of a forward's small kernels: norms, rotary embeddings, activation functions and sums."""
        shape = self._shape
        rotated = shape.queries + shape.keys
        norms = 36 * (2 * shape.hidden + rotated * shape.has_qk_norm)
        wide = shape.mlp * max(1, shape.experts_per_token)
        sparse = 50 * shape.hidden * shape.experts_per_token + 40 * shape.experts
        each = norms + 24 * rotated + 12 * shape.hidden + 10 * wide + sparse
        return shape.layers * each * tokens / self._rates.copy

    def host(self, kind: str) -> float:
        """Seconds in which the host launches the kernels of all blocks."""
        which = "forward" if "forward" in kind else "keep"
        more = len(self._shape.adapters) * ADAPTER_OPS[which]
        more += QUANTIZED_OPS[which] if self._shape.base is not None else 0
        return self._shape.layers * (OPS[kind] + more) / self._rates.host_op

    def head(self, predicted: float, matmuls: int) -> float:
        """Seconds of so many matmuls of the output head; each chunk of logits is read and written around it."""
        shape = self._shape
        matmul = 2 * shape.embedding * predicted / self._rates.matmul
        return matmuls * (1.1 * matmul + 2 * self._itemsize * shape.vocabulary * predicted / self._rates.copy)

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
            - self._untrained(part.tokens)
            + BACKWARD_BYTES * small
            + 2 * starts
            + recompute
            + self.head(part.completion_tokens, 4 if self._shape.lora is None else 3)
        )
        offload = (
            activation_bytes(self._shape, self._itemsize, choice, keep_last).offloaded
            * part.tokens
            / self._rates.link_out
        )
        exposed = max(0.0, offload - forward)
        host = self.host(kind) + leaving * self._shape.trained_tensor_count * LEAVING_OPS / self._rates.host_op
        return overlap(device, host) + exposed, exposed


class FusedSpeed(Speed):
    """Predicts seconds of fused blocks."""

    def forward(self, tokens: float, length: float) -> float:
        return overlap(self._forward(tokens, length), self.host("fused forward"))

    def host(self, kind: str) -> float:
        more = FUSED_EXPERTS_OPS[kind] if self._shape.experts else 0
        return super().host(kind) + self._shape.layers * more / self._rates.host_op

    def _forward(self, tokens: float, length: float) -> float:
        """Seconds of a forward on the device."""
        starts = self._shape.layers * FUSED_STARTS
        return self._linear(tokens) + self._attention(tokens, length) + self._fused(tokens) + starts

    def _linear(self, tokens: float) -> float:
        """Seconds of a forward's matmuls, and of making numbers of a quantized base for them."""
        shape = self._shape
        grouped = 3 * shape.hidden * shape.mlp * shape.experts_per_token if shape.experts else 0
        dense = shape.matmul_parameters_per_token - grouped
        each = FUSED_MATMULS * dense + GROUPED_MATMULS * grouped
        numbers = dequantized_traffic(shape) / self._rates.copy
        return 2 * shape.layers * each * tokens / self._rates.matmul + numbers

    def _attention(self, tokens: float, length: float) -> float:
        """Seconds of a forward's attention: its arithmetic, and what it reads and writes."""
        shape = self._shape
        flops = 2 * shape.queries * (length + TILES) * tokens
        passed = 2 * self._itemsize * (shape.queries + shape.keys) * tokens
        return shape.layers * (flops / (FUSED_ATTENTION * self._rates.matmul) + passed / self._rates.copy)

    def _fused(self, tokens: float, *, backward: bool = False) -> float:
        """Seconds of the kernels between the matmuls, in a forward or in a backward."""
        shape = self._shape
        heads, wide = shape.queries + 2 * shape.keys, shape.mlp * max(1, shape.experts_per_token)
        # Rows of experts are gathered and combined; the router's probabilities are float32.
        sparse = 3 * shape.experts_per_token * shape.hidden + (10 * shape.experts if shape.experts else 0)
        numbers = 12 * shape.hidden + 5 * heads + 6 * wide if backward else 9 * shape.hidden + 2 * heads + 3 * wide
        each = self._itemsize * (numbers + (2 if backward else 1) * sparse)
        return FUSED_BYTES * shape.layers * each * tokens / self._rates.copy

    def _recomputed(self, tokens: float, length: float, choice: ActivationPolicy) -> float:
        """Seconds of what the backward recomputes."""
        shape, names = self._shape, choice.recompute
        inputs = {
            "core_attn": shape.hidden * (shape.queries + 2 * shape.keys),
            "mlp_norm": shape.queries * shape.hidden,
            "mlp_act": 2 * shape.hidden * shape.mlp,
            "moe_router": shape.hidden * shape.experts,
            "moe_act": 2 * shape.hidden * shape.mlp * shape.experts_per_token,
        }
        if shape.has_post_norms:  # What the MLP returns is saved with it.
            inputs["mlp_norm"] += 3 * shape.hidden * shape.mlp
        factors = {"moe_act": GROUPED_MATMULS}
        flops = sum(2 * factors.get(name, FUSED_MATMULS) * inputs.get(name, 0) for name in names)
        each = flops * tokens / self._rates.matmul
        if "attn_proj" in names:
            each += self._attention(tokens, length) / shape.layers
        blocks = shape.layers if choice.recompute_blocks is None else min(shape.layers, choice.recompute_blocks)
        return blocks * each

    def update(
        self, part: MicroBatchSize, length: float, choice: ActivationPolicy, keep_last: int, leaving: float = 0.0
    ) -> tuple[float, float]:
        forward = self._forward(part.tokens, length)
        device = (
            forward
            + (2 if self._shape.lora is None else 1) * self._linear(part.tokens)
            + ATTENTION_BACKWARD * self._attention(part.tokens, length)
            + self._fused(part.tokens, backward=True)
            + 2 * self._shape.layers * FUSED_STARTS
            + self._recomputed(part.tokens, length, choice)
            + self.head(part.completion_tokens, 4 if self._shape.lora is None else 3)
        )
        offloaded = fused_costs.activation_bytes(self._shape, self._itemsize, choice, keep_last).offloaded
        exposed = max(0.0, offloaded * part.tokens / self._rates.link_out - forward)
        host = self.host("fused") + leaving * self._shape.trained_tensor_count * LEAVING_OPS / self._rates.host_op
        return overlap(device, host) + exposed, exposed


def overlap(device: float, host: float) -> float:
    """Seconds of work that the host launches while the device runs it: about the longer of the two, and more if they
    are about equal, because each then waits for the other at times."""
    return float((device**4 + host**4) ** 0.25)
