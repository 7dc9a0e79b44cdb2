"""The section `optimizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ebbtide.config.base import Fraction, Natural, NotNegative, Positive, Section


class OptimizerConfig(Section):
    """AdamW, with fp32 master weights where the weights are 16-bit."""

    lr: Positive = 1e-6
    """Peak learning rate."""

    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of the two moments (beta1, beta2)."""

    eps: Positive = 1e-8
    """Added to the denominator of the update."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, on matrices only, never on norms and biases."""

    clip_norm: Positive | None = 1.0
    """Maximum global gradient norm (gradient clipping); `null` never clips."""

    warmup_steps: Natural = 0
    """Optimizer steps in which the learning rate rises linearly from 0."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays after the warm-up."""

    final_lr_fraction: Fraction = 0.0
    """Learning rate at the end of `linear` and `cosine`, as a fraction of `lr` (`min_lr_ratio`)."""

    min_lr: NotNegative | None = None
    """Learning rate at the end of `linear` and `cosine`, in place of `final_lr_fraction`."""

    place: Literal["device", "streamed", "cpu"] = "device"
    """Where the optimizer state is and where the step is computed: `device` is the GPU for both; `streamed` offloads
    the state to pinned host memory and streams it through the GPU chunk by chunk at each step, with bit-identical
    results; `cpu` keeps it in host memory and computes the step on the CPU."""

    cpu_fraction: Fraction | None = None
    """Fraction of the parameters whose step is computed on the CPU while the GPU steps the others, whose state is in
    `place`; `null` is none of them, or all with `place: cpu`."""

    overlap: bool = True
    """Overlap copies with the backward and with the steps of other chunks. Off: everything runs in sequence, with
    bit-identical results, for debugging."""

    state_dtype: Literal["float32", "bfloat16", "bfloat16_stochastic"] = "float32"
    """Type of the two moments. The bfloat16 types halve their memory and are NOT exact: `bfloat16` rounds to nearest,
    which freezes a second moment that changes by less than 0.4% per step; `bfloat16_stochastic` rounds up or down at
    random and is right on average."""

    grad_dtype: Literal["auto", "float32"] = "auto"
    """Type in which gradients are accumulated over micro-batches; `auto` is the type of the weights."""

    check_for_nan_in_grad: Literal["skip", "stop", "ignore"] = "skip"
    """What happens on a NaN or Inf in a gradient: `skip` skips the step and counts it; `stop` ends the run; both name
    the first parameter affected and leave weights and state untouched. `ignore` takes the step anyway."""

    @model_validator(mode="after")
    def _final_lr_needs_decay(self) -> OptimizerConfig:
        if self.schedule == "constant" and self.final_lr_fraction:
            raise ValueError(
                f"`optimizer.final_lr_fraction: {self.final_lr_fraction}` needs `optimizer.schedule: linear` or"
                " `cosine`"
            )
        if self.min_lr is None:
            return self
        if self.schedule == "constant":
            raise ValueError(
                f"`optimizer.min_lr: {self.min_lr:g}` is where a schedule ends, and `optimizer.schedule: constant`"
                " stays at `optimizer.lr`: set `linear` or `cosine`, or remove `min_lr`"
            )
        if self.final_lr_fraction:
            raise ValueError(
                f"`optimizer.min_lr: {self.min_lr:g}` and `optimizer.final_lr_fraction: {self.final_lr_fraction:g}`"
                " both say where the schedule ends: remove one of the two"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"`optimizer.min_lr: {self.min_lr:g}` is above `optimizer.lr: {self.lr:g}`, from which the schedule"
                " decays: lower it"
            )
        return self

    @model_validator(mode="after")
    def _cpu_fraction_needs_device(self) -> OptimizerConfig:
        if self.place == "cpu" and self.cpu_fraction not in (None, 1.0):
            raise ValueError(
                "`optimizer.place: cpu` steps all parameters on the CPU, and `optimizer.cpu_fraction:"
                f" {self.cpu_fraction:g}` only some: set `optimizer.place` to `device` or `streamed`, for the others,"
                " or remove the fraction"
            )
        return self

    @property
    def cpu_share(self) -> float:
        """The fraction of the parameters whose step is computed on the CPU."""
        return 1.0 if self.place == "cpu" else self.cpu_fraction or 0.0

    @property
    def is_state_on_host(self) -> bool:
        """Whether all of the optimizer state is in host memory in every phase."""
        return self.place != "device" or self.cpu_share == 1.0
