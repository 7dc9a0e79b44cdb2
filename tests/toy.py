"""A toy model with all that an optimizer may meet, trained by it in any mode, and the same in float64."""

import math

import torch
from torch import nn

from ebbtide.config.memory import MemoryConfig
from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from plans import plan_of

CPU = torch.device("cpu")
STEPS = 20
MODES = {
    "device": {},
    "streamed": {"place": "streamed"},
    "cpu": {"place": "cpu"},
    "split, device": {"cpu_fraction": 0.4},
    "split, streamed": {"place": "streamed", "cpu_fraction": 0.7},
}
ON_CPU = [name for name in MODES if "cpu" in name or "split" in name]


class Toy(nn.Module):
    """Tied embeddings, odd sizes, a frozen matrix, and one that no gradient reaches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(31, 17)
        self.hidden = nn.Linear(17, 23, bias=True)
        self.frozen = nn.Linear(23, 17, bias=False)
        self.norm = nn.LayerNorm(17)
        self.unused = nn.Linear(5, 3)
        self.last = nn.Linear(17, 17, bias=False)
        self.frozen.weight.requires_grad = False
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.last(self.norm(self.frozen(x))) @ self.embedding.weight.T


def trained(
    dtype=torch.float32,
    steps=STEPS,
    microbatches=3,
    memory=None,
    lr=1e-2,
    device=CPU,
    start=0,
    state=None,
    weights=None,
    **options,
):
    """(model, residency, optimizer, the figures of each step) after some steps on random targets."""
    config = OptimizerConfig(**{"weight_decay": 0.1, "clip_norm": 0.5, **options})
    residency = Residency(plan_of(memory or MemoryConfig(), config), device)
    model = Toy(dtype).to(device)
    optimizer = AdamW(model.named_parameters(), config, residency)
    if state is not None:
        if dtype == torch.float32:  # such weights are their own masters: whoever sets the state has set them
            model.load_state_dict(weights)
        optimizer.restore([state[0]], state[1])
    residency.pin()
    generator = torch.Generator().manual_seed(1)
    figures = []
    batches = torch.randint(31, (steps, microbatches, 2, 8), generator=generator).to(device)
    for step in range(start, steps):
        figures.append(one_step(model, residency, optimizer, batches[step], lr * 0.95**step))
    return model, residency, optimizer, figures


def one_step(model, residency, optimizer, batch, lr=1e-2):
    """The figures of a step on micro-batches of tokens and targets."""
    with residency.phase("train"):
        for tokens, targets in batch:
            (nn.functional.cross_entropy(model(tokens).float(), targets) / len(batch)).backward()
    with residency.phase("step"):
        figures = optimizer.step(lr)
    assert all(parameter.grad is None for parameter in model.parameters())
    return figures


def state_of(optimizer):
    """(masters and moments as they are stored, steps): what `restore` takes."""
    for name in ("master", "moments"):
        if name in optimizer._residency.holdings():
            optimizer._residency.need(name)
    tensors = {}
    for name, stored in optimizer.state().items():
        tensors[name] = torch.empty(stored.region.size.numel(), dtype=stored.dtype)
        stored.fill(tensors[name], lambda tensor: tensor)
    return tensors, optimizer.steps


def same(one, other) -> bool:
    mine, theirs = one[0].state_dict(), other[0].state_dict()
    return one[3] == other[3] and all(torch.equal(mine[key], theirs[key]) for key in mine)


def in_double(lr=1e-2, betas=(0.9, 0.999), decay=0.1, eps=1e-8, clip=0.5):
    """The same training in float64 throughout, by the formula of AdamW's paper."""
    model = Toy(torch.float32).double()
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    first, second = ({name: torch.zeros_like(weight) for name, weight in named.items()} for _ in range(2))
    batches = torch.randint(31, (STEPS, 3, 2, 8), generator=torch.Generator().manual_seed(1))
    for step in range(1, STEPS + 1):
        rate = lr * 0.95 ** (step - 1)
        for tokens, targets in batches[step - 1]:
            (nn.functional.cross_entropy(model(tokens), targets) / 3).backward()
        grads = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        with torch.no_grad():
            for name, grad in grads.items():
                grad *= min(1.0, clip / (norm + 1e-6))
                first[name] = betas[0] * first[name] + (1 - betas[0]) * grad
                second[name] = betas[1] * second[name] + (1 - betas[1]) * grad.square()
                hat1, hat2 = first[name] / (1 - betas[0] ** step), second[name] / (1 - betas[1] ** step)
                named[name] *= 1 - rate * (decay if named[name].ndim >= 2 else 0)
                named[name] -= rate * hat1 / (hat2.sqrt() + eps)
                named[name].grad = None
    return model.state_dict()


def error(model: nn.Module, truth) -> float:
    return math.sqrt(
        sum(
            (value.double().cpu() - truth[key].double().cpu()).square().sum().item()
            for key, value in model.state_dict().items()
        )
    )
