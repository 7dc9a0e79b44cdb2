"""Which linear layers have adapters (`model.lora`), and what of a model cannot be frozen in 8 or 4 bits. This file
imports no torch."""

from __future__ import annotations

from ebbtide.config.model import LoraConfig
from ebbtide.errors import UserError


def no_quantized_experts() -> UserError:
    """The error for a quantized base of a mixture of experts."""
    return UserError(
        "`model.base` for a mixture of experts is not supported: its experts are no linear layers. Remove it, or choose"
        " a dense model"
    )


def check_targets(lora: LoraConfig, names: set[str], called: str = "`model.lora`", *, sparse: bool = False) -> set[str]:
    """Those of a block's linear layers that have an adapter; raises for names that are none of them. `called`: how an
    error names the adapter. `sparse`: whether it is a mixture of experts."""
    if odd := sorted({*(lora.targets or ()), *lora.exclude} - names):
        why = ". Experts and their router cannot have adapters yet: they stay as they are" if sparse else ""
        raise UserError(
            f"{called} names `{odd[0]}`, and the linear layers of the model's blocks that can have an adapter are:"
            f" {', '.join(sorted(names))}{why}"
        )
    wanted = (set(lora.targets) if lora.targets is not None else names) - set(lora.exclude)
    if not wanted:
        raise UserError("`model.lora`: no linear layer is left that gets an adapter: shorten `model.lora.exclude`")
    return wanted
