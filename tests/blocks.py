"""A tiny model whose gradients are compared under any choice of activations."""

import torch

from conftest import TINY, family, merged
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.loss import LossConfig
from ebbtide.memory.activations import ActivationOffloader
from ebbtide.memory.mover import Mover
from ebbtide.model.load import LoadedModel, blocks_of, load_model
from ebbtide.policy.activation_plan import PlacedBlocks
from ebbtide.policy.block_activations import ActivationChoice, locally_recomputable
from ebbtide.policy.datum import trajectory
from ebbtide.policy.fuse import saved_names
from ebbtide.policy.losses import build_loss
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress

CPU = torch.device("cpu")
DENSE = [
    "block_input",
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_fc1",
    "mlp_act",
    "mlp_fc2",
]
SPARSE = [
    "block_input",
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "moe_router",
]


class Watched(ActivationOffloader):
    """Remembers what was still parked each time it was reset."""

    def reset(self) -> None:
        self.left = [*getattr(self, "left", []), len(self._stack)]
        super().reset()


class Setup:
    """A tiny model of four blocks, some packed sequences in several micro-batches, and their gradients."""

    def __init__(
        self,
        name: str,
        dtype: str = "float32",
        device: str = "cpu",
        size: int = 1,
        *,
        fused: bool = False,
        given: LoadedModel | None = None,
        **more,
    ) -> None:
        """`given`: a model that is used instead of one from nothing."""
        changes = {**family(name), **more, "model.scratch.layers": 4, "model.dtype": dtype, "device": device}
        if size > 1:  # long enough that copies take time
            changes |= {
                "model.scratch.hidden": 32 * size,
                "model.scratch.mlp": 48 * size,
                "train.microbatch_tokens": 64 * size,
                "model.scratch.context": 64 * size,
            }
        config = GrpoConfig.model_validate(merged(TINY, changes))
        torch.manual_seed(0)
        loaded = given or load_model(config)
        self.model, self.policy, self.blocks = loaded.model, Policy(loaded, config), blocks_of(loaded.model)
        if fused:
            self.policy.fuse_blocks()
            assert self.policy._fused is not None
        generator = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            return torch.randint(11, (count,), generator=generator).tolist()

        lengths = [size * (4 + i % 5) for i in range(12)]
        self.sequences = [
            trajectory(tokens(3 + i % 3), tokens(n), [-2.0] * n, (-1.0) ** i, 0.01) for i, n in enumerate(lengths)
        ]
        self.kept = self.grads()

    def grads(self) -> dict[str, torch.Tensor]:
        self.policy.forward_backward(self.sequences, build_loss(LossConfig()), no_progress)
        found = {name: weight.grad.clone() for name, weight in self.model.named_parameters() if weight.grad is not None}
        self.model.zero_grad()
        return found

    def with_choice(
        self, offload=(), recompute=(), room=2**22, recompute_blocks=None, **options
    ) -> ActivationOffloader:
        """Gradients under a choice are those of keeping everything."""
        memory = torch.zeros(room, dtype=torch.uint8, pin_memory=self.policy.device.type == "cuda")
        parking = Watched(memory, Mover(self.policy.device))
        local = locally_recomputable(self.blocks[0])
        choice = ActivationChoice(frozenset(offload), frozenset(recompute), local, recompute_blocks)
        blocks = PlacedBlocks(self.blocks, self.policy._fused)
        self.policy._activations = blocks.hooks(choice, parking, **{"keep_last": 1, "minimum": 1, **options})
        try:
            got = self.grads()
        finally:
            self.policy._activations = None
        assert got.keys() == self.kept.keys()
        assert all(torch.equal(self.kept[name], grad) for name, grad in got.items())
        assert not any(parking.left)  # all of it was taken back by the backward
        return parking

    def with_each_choice(self) -> None:
        """Each of a block's names offloaded, each recomputed, and all recomputed."""
        names = saved_names(self.blocks[0])
        for one in names:
            self.with_choice([one])
            if one != "block_input":
                self.with_choice(recompute=[one])
        self.with_choice(recompute=[one for one in names if one != "block_input"])


def errors_in_bfloat16(name: str, device: str = "cpu", **sizes) -> list[torch.Tensor]:
    """Relative errors [seeds, weights] of gradients in bfloat16 against float32: of transformers' own blocks, and of
    fused ones."""
    exact = Setup(name, "float32", device, **sizes)
    setups = [Setup(name, "bfloat16", device, fused=fused, **sizes) for fused in (False, True)]
    errors: list[list[torch.Tensor]] = [[], []]
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for right, *others in zip(*(one.model.parameters() for one in (exact, *setups)), strict=True):
                right += 0.1 * torch.randn(right.shape, generator=generator).to(device)
                right.copy_(right.bfloat16())
                for other in others:
                    other.copy_(right)
        wanted = exact.grads()
        for kind, setup in zip(errors, setups, strict=True):
            found = setup.grads()
            off = [(found[weight].float() - grad).norm() / grad.norm() for weight, grad in wanted.items()]
            kind.append(torch.stack(off))
    return [torch.stack(kind) for kind in errors]
