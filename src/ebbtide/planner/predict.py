"""What each phase of a step takes: bytes on the device by holding, bytes on the host, bytes moved, seconds, and seconds exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.config.tree import Config
from ebbtide.memory.plan import MOVABLE, NEEDS, Name, Phase, Plan, build_plan
from ebbtide.optim.sizes import grad_bytes, ring_bytes, state_bytes
from ebbtide.planner.machine import Machine
from ebbtide.planner.saved import CARRIED, Choice, chosen, held
from ebbtide.planner.seconds import Speed
from ebbtide.planner.shape import Shape
from ebbtide.planner.work import Work
from ebbtide.rollout.paged.room import BLOCKS, CHUNKS, Room, blocks_for, size_for, useful_blocks

CYCLE: tuple[Phase, ...] = ("generate", "score", "logprob", "train", "step")
LIBRARIES = 64 * 2**20  # device memory that products take for themselves, once


@dataclass
class Foretold:
    """Of one phase. Bytes."""

    device: dict[str, int] = field(default_factory=dict)
    """By holding, and `activations`, `logits`, `workspace`."""
    host: int = 0
    moved: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def peak(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Prediction:
    phases: Mapping[Phase, Foretold]
    blocks: int
    """Of the cache, that generation has."""
    block: int
    """Tokens of each."""
    at_once: int
    """Sequences that decode at once."""
    activations: Choice

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases.values())

    @property
    def tightest(self) -> Phase:
        return max(self.phases, key=lambda phase: self.phases[phase].peak)

    @property
    def host(self) -> int:
        return max(phase.host for phase in self.phases.values())

    @property
    def seconds(self) -> float:
        """Of a whole step, without evaluation and saving."""
        return sum(self.phases[phase].seconds for phase in CYCLE)


def room_of(shape: Shape) -> Room:
    """What the paged engine makes of a shape."""
    mlp = max(shape.mlp * max(1, shape.experts_per_token), shape.dense_mlp)
    return Room(shape.layers, shape.kv_heads, shape.head_dim, shape.hidden, shape.heads, mlp, shape.vocabulary)


class Predictor:
    """One model on one machine: `of(config, work)` for as many configs as are tried."""

    def __init__(self, shape: Shape, machine: Machine, *, each: int = 2, on_cpu: bool = False) -> None:
        self.shape, self.machine, self.each = shape, machine, each
        self._kind = "cpu" if on_cpu else "cuda"
        self._speed = Speed(shape, machine.rates, each)

    def of(self, config: Config, work: Work, budget: int) -> Prediction:
        """`budget`: bytes that the device's allocator may have; what generation leaves of it is the cache's."""
        plan = build_plan(config.memory, config.optimizer)
        sizes, resident = self._holdings(config)
        host_always = sum(resident.values())
        phases = {phase: Foretold(on, host_always) for phase, on in _where(plan, sizes).items()}
        away = {name for name in sizes if plan.ever_away(name)}  # host memory is pinned for these once, and stays
        for phase in phases.values():
            phase.host += sum(sizes[name] for name in away)
        choice = self.choice(config, work)
        self._train(config, work, choice, phases["train"])
        self._logprob(config, work, phases["logprob"])
        phases["step"].device["workspace"] = ring_bytes(config.optimizer, self.shape.parameters, self.each)
        blocks, at_once = self._generate(work, config.rollout.batch, phases["generate"], budget)
        if config.evaluate is not None:
            tests = Work(config.evaluate.problems, config.evaluate.samples, work.prompt, work.new)
            self._generate(tests, config.rollout.batch, phases["evaluate"], budget)
        else:
            del phases["evaluate"]
        if config.checkpoint is None:
            del phases["save"]
        for phase in phases.values():
            phase.device["workspace"] = phase.device.get("workspace", 0) + LIBRARIES * (self._kind == "cuda")
        self._time(config, work, plan, sizes, choice, phases, at_once)
        return Prediction(phases, blocks, BLOCKS[self._kind], at_once, choice)

    def choice(self, config: Config, work: Work) -> Choice:
        """What `memory.activations` comes to on this machine."""
        packed = work.packed(config.train.microbatch_tokens, config.train.minibatches)
        layers = max(1, self.shape.layers - config.memory.activations.keep_last)
        forward = self._speed.forward(packed.tokens, work.prompt + work.new) / max(1, packed.tokens)
        carried = CARRIED * self.machine.rates.link_out * forward / layers
        return chosen(config.memory.activations, self.shape, self.each, carried)

    # Memory

    def _holdings(self, config: Config) -> tuple[dict[Name, int], dict[str, int]]:
        """(bytes of what is on the device unless it is away, bytes that live on the host)."""
        parameters = self.shape.parameters
        moving, resident = state_bytes(config.optimizer, parameters, self.each)
        sizes: dict[Name, int] = {"weights": self.each * parameters, **moving}
        on_device = parameters if not config.optimizer.overlap else parameters - round(config.optimizer.on_cpu * parameters)
        sizes["grads"] = grad_bytes(config.optimizer, self.each) * on_device
        if config.loss.kl is not None:
            sizes["reference"] = self.each * parameters
        return {name: size for name, size in sizes.items() if size or name == "grads"}, resident

    def _train(self, config: Config, work: Work, choice: Choice, phase: Foretold) -> None:
        """The largest of five moments: in the head; in the norm before it; in the last block's backward; in the first's; and at the end, in the embedding."""
        shape, each, hidden = self.shape, self.each, self.shape.hidden
        packed = work.packed(config.train.microbatch_tokens, config.train.minibatches)
        tokens, predicted, chunk = packed.tokens, packed.predicted, config.train.head_chunk_tokens
        activations = held(shape, each, choice, config.memory.activations.keep_last)
        grad = grad_bytes(config.optimizer, each)
        of_blocks, of_head = grad * shape.layers * shape.block, grad * shape.embedding
        whole = phase.device["grads"]
        # Gradients that leave as they are made are there for a moment; in the first micro-batch the others are made one by one.
        leaving = config.optimizer.overlap and config.optimizer.on_cpu == 1.0
        before = whole if packed.count > 1 and not leaving else 0
        passing = 2 * grad * shape.block if leaving else 0
        logits = each * min(chunk, predicted) * shape.vocabulary
        head = 4 * shape.embedding + logits + max(logits if predicted > chunk else 0, each * shape.embedding)
        after_norm = (activations.normed - (16 + each) * hidden) * tokens  # saved for the norm's backward
        moments = {
            "head": (before, activations.blocks * tokens + after_norm + 2 * each * hidden * predicted, head),
            "norm": (max(before, of_head), (activations.blocks + activations.normed) * tokens, 0),
            "last": (max(before, of_head + passing), (activations.blocks + activations.running + each * hidden) * tokens, 0),
            "first": (
                max(before, of_head + passing) if leaving else max(before, min(whole, of_blocks + of_head)),
                (activations.one + activations.running + each * hidden) * tokens,
                0,
            ),
            "end": (max(before, of_head + passing) if leaving else whole, each * hidden * tokens, each * shape.embedding),
        }
        grads, of_activations, rest = max(moments.values(), key=sum)
        phase.device |= {"grads": grads, "activations": of_activations, "logits": rest}
        phase.host += round(1.02 * activations.parked * min(tokens, config.train.microbatch_tokens))

    def _logprob(self, config: Config, work: Work, phase: Foretold) -> None:
        """Forwards without gradient: the widest place of a block, or the head."""
        if not config.needs_old_logprobs and config.loss.kl is None:
            return
        shape, each = self.shape, self.each
        packed = work.packed(config.train.microbatch_tokens)
        wide = shape.mlp * max(1, shape.experts_per_token)
        gathered = 2 * shape.experts_per_token * shape.hidden
        block = each * (3 * shape.hidden + 3 * wide + gathered) * packed.tokens
        logits = each * min(config.train.head_chunk_tokens, packed.predicted) * shape.vocabulary
        logits *= 2 if packed.predicted > config.train.head_chunk_tokens else 1
        head = each * shape.hidden * (packed.tokens + packed.predicted)
        if block > head + logits:
            phase.device["activations"] = block
        else:
            phase.device |= {"activations": head, "logits": logits}

    def _generate(self, work: Work, batch: int, phase: Foretold, budget: int) -> tuple[int, int]:
        """Sets what the phase takes; (blocks of the cache, sequences that decode at once)."""
        room, block, chunk = room_of(self.shape), BLOCKS[self._kind], CHUNKS[self._kind]
        prompt, new = round(work.prompt), round(work.new)
        useful = useful_blocks([(prompt, work.samples)] * work.prompts, new, batch, block)
        fits = room.blocks(self.each, block, chunk, batch, max(0, budget - phase.peak))
        blocks = min(useful, fits)
        own = blocks_for(new, block) + 1
        shared = blocks_for(prompt, block)
        rows = min(batch, work.sequences)
        groups = -(-rows // work.samples)
        if blocks < useful:
            at_once = int(blocks // (own + shared / work.samples))
            rows = min(rows, at_once)
        read = min(chunk, (groups if blocks < useful else work.prompts) * prompt)
        wide = max(shape_width(self.shape), 1)
        reading = self.each * read * (3 * self.shape.hidden + 3 * wide)
        size = size_for(max(1, rows))
        splits = -(-new // 256) + -(-prompt // 256)
        decoding = (
            self.each * size * (2 * self.shape.vocabulary + 4 * self.shape.hidden + 3 * wide) + 4 * splits * size * self.shape.queries
        )
        phase.device |= {"kv_cache": blocks * block * room.bytes(self.each), "workspace": max(reading, decoding) + decoding}
        return blocks, rows

    # Seconds

    def _time(
        self,
        config: Config,
        work: Work,
        plan: Plan,
        sizes: Mapping[Name, int],
        choice: Choice,
        phases: Mapping[Phase, Foretold],
        at_once: int,
    ) -> None:
        speed, rates, train = self._speed, self.machine.rates, config.train
        updates = train.minibatches * train.epochs
        packed = work.packed(train.microbatch_tokens, train.minibatches)
        length = work.prompt + work.new
        passes = (1 if config.needs_old_logprobs else 0) + (1 if config.loss.kl is not None else 0)
        whole = work.packed(train.microbatch_tokens)
        phases["logprob"].seconds = (
            passes * whole.count * speed.logprobs(work.tokens / whole.count, work.sequences * work.new / whole.count, length)
        )
        share = work.tokens / train.minibatches / packed.count
        predicted = work.sequences * work.new / train.minibatches / packed.count
        once, exposed = speed.update(share, predicted, length, choice, config.memory.activations.keep_last)
        phases["train"].seconds = updates * packed.count * once
        phases["train"].exposed = updates * packed.count * exposed
        stepped, waited = speed.step(config.optimizer, rates)
        phases["step"].seconds, phases["step"].exposed = updates * stepped, updates * waited
        phases["generate"].seconds = speed.generate(work, max(1, at_once))
        if "evaluate" in phases and config.evaluate is not None:
            tests = Work(config.evaluate.problems, config.evaluate.samples, work.prompt, work.new)
            phases["evaluate"].seconds = speed.generate(tests, min(config.rollout.batch, tests.sequences))
        for name in (name for name in MOVABLE if name in sizes and plan.ever_away(name)):
            self._moves(plan, name, sizes[name], phases)
        if "save" in phases:
            copied = sum(phases["save"].device.get(name, 0) for name in ("weights", "master", "moments"))
            phases["save"].seconds = phases["save"].exposed = copied / rates.link_out
            phases["save"].moved += copied

    def _moves(self, plan: Plan, name: Name, size: int, phases: Mapping[Phase, Foretold]) -> None:
        """Out when a phase wants it away, behind that phase; in ahead of its use where the phase before lets it, else while compute waits."""
        if name == "grads" and not any(plan.place(phase, name) == "away" for phase in ("score",)):
            return  # between steps there are none
        rates = self.machine.rates
        on = _path(plan, name)
        for place, phase in enumerate(CYCLE):
            before = on[CYCLE[place - 1]]
            if before and not on[phase]:
                if name != "reference":  # which never changes: leaving copies nothing
                    phases[phase].moved += size
            elif on[phase] and not before:
                phases[phase].moved += size
                taken = size / rates.link_in
                late = taken if name in NEEDS[phase] else max(0.0, taken - phases[phase].seconds)
                phases[phase].exposed += late
                phases[phase].seconds += late


def shape_width(shape: Shape) -> int:
    """Numbers that the widest place of a block has of a token."""
    return max(shape.mlp * max(1, shape.experts_per_token), shape.dense_mlp)


def _path(plan: Plan, name: Name) -> dict[Phase, bool]:
    """Phase -> whether a holding is on the device in it, once round and round again."""
    here, found = True, {}
    for phase in (*CYCLE, *CYCLE):
        if plan.place(phase, name) in ("away", "host"):
            here = False
        elif name in plan.fetched(phase):
            here = True
        found[phase] = here
    return found


def _where(plan: Plan, sizes: Mapping[Name, int]) -> dict[Phase, dict[str, int]]:
    """Phase -> bytes on the device of each holding. Gradients are there in train and step only."""
    paths = {name: _path(plan, name) for name in sizes}
    found: dict[Phase, dict[str, int]] = {}
    for phase in (*CYCLE, "save", "evaluate"):
        on: dict[str, int] = {}
        for name, size in sizes.items():
            after_a_step = paths[name]["step"] and plan.place(phase, name) != "away"
            here = paths[name][phase] if phase in CYCLE else after_a_step
            if here and (name != "grads" or phase in ("train", "step")):
                on[name] = size
        found[phase] = on
    return found
