"""Foretells what each phase of a step takes, of one rank of one model on one machine, for any config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ebbtide.checkpoint.sizes import copied_bytes
from ebbtide.config.tree import Config, Rehearsal, Vllm
from ebbtide.memory.plan import HOST_SHARE, MOVABLE, PHASES, Name, Phase, build_plan
from ebbtide.optim.sizes import CPU_CHUNK, grad_bytes, low_bytes, moment_bytes, ring_bytes, state_bytes
from ebbtide.planner.foretold import Foretold, Generation, Prediction, Spent
from ebbtide.planner.machine import GIB, Machine
from ebbtide.planner.moves import make_room, move, path, places
from ebbtide.planner.ranks import SENT, Gathers, Sharing, Talk
from ebbtide.planner.saved import CARRIED, Choice, chosen, held, whole_block
from ebbtide.planner.seconds import Speed
from ebbtide.planner.shape import Shape
from ebbtide.planner.work import Part, Work
from ebbtide.rollout.paged.room import BLOCKS, CHUNKS, SHARE, Room, blocks_for, size_for, useful_blocks
from ebbtide.rollout.paged.schedule import most_blocks

PROBE = 8192  # tokens on which a run holds `memory.activations` against the link
LIBRARIES = 96 * 2**20  # device memory that products and rotary tables take, once


def room_of(shape: Shape) -> Room:
    """What the paged engine makes of a shape."""
    return Room(shape.layers, shape.kv_heads, shape.head_dim, shape.hidden, shape.heads, shape_width(shape), shape.vocabulary)


class _Base(NamedTuple):
    sizes: dict[Name, int]
    host: int
    where: dict[Phase, dict[str, int]]
    """Bytes on the device."""
    paths: dict[Name, dict[Phase, bool]]
    """Of what ever moves: whether it is on the device."""


class Predictor:
    """One rank's part of one model, on one machine: `of(config, work)` for as many configs as are tried. Of several ranks it is the first, which has the most."""

    def __init__(self, shape: Shape, machine: Machine, *, each: int = 2, on_cpu: bool = False, sharing: Sharing | None = None) -> None:
        self.shape, self.machine, self.each = shape, machine, each
        self.sharing = sharing or Sharing()
        self._part = shape.part(self.sharing.tensor)
        """What is computed here of a sample that is trained on. Generation has the whole."""
        self._held = self._part.held(self.sharing.shards)
        """Parameters that are here."""
        self._gathers = Gathers(shape, self._part, self.sharing, machine.links, each) if self.sharing.size > 1 else None
        self._kind = "cpu" if on_cpu else "cuda"
        self.chunk = CHUNKS[self._kind]
        """Tokens that generation reads in one go."""
        self._speed = Speed(self._part, machine.rates, each, self._held, self.sharing.here, groups=machine.groups)
        self._whole_speed = Speed(shape, machine.rates, each, groups=machine.groups)
        # What configs that are tried have in common.
        self._bases: dict[tuple[object, ...], _Base] = {}
        self._looked: dict[tuple[int, Work], Spent] = {}
        self._updated: dict[tuple[int, int, Work, Choice, int, float], tuple[int, Spent]] = {}

    def of(self, config: Config, work: Work, budget: int, rehearsal: Rehearsal | None = None) -> Prediction:
        """`budget`: bytes that the device's allocator may have; what generation leaves of it is the cache's."""
        base = self._base(config, rehearsal)
        phases = {phase: Foretold(dict(on), base.host) for phase, on in base.where.items()}
        if config.rollout.engine == "vllm":
            vllm = config.rollout.vllm or Vllm()
            for at, phase in phases.items():
                if at in ("generate", "evaluate") or vllm.sleep_level == 0:
                    phase.device["kv_cache"] = int(vllm.memory_share * self.machine.device_gib * GIB)  # with its own weights
        choice = self.choice(config)
        if config.needs_old_logprobs or config.loss.kl is not None:
            self._forward(config, work, phases["logprob"])
        if rehearsal is not None:
            self._forward(config, work, phases["train"])
        else:
            self._train(config, work, choice, phases["train"])
            phases["step"].device["workspace"] = ring_bytes(config.optimizer, self._held, self.each)
        generation = Generation(None, BLOCKS[self._kind], 0, roomy=True, at_once=0, least_peak=0.0)  # of a replay
        if config.evaluate is not None:
            tests = replace(work, prompts=config.evaluate.problems, samples=config.evaluate.samples)
            generation = self._generate(config, tests, phases["evaluate"], budget)
        if config.rollout.replay is None:
            generation = self._generate(config, work, phases["generate"], budget)
        if config.evaluate is None:
            del phases["evaluate"]
        if config.checkpoint is None:
            del phases["save"]
        for phase in phases.values():
            phase.device["workspace"] = phase.device.get("workspace", 0) + LIBRARIES * (self._kind == "cuda")
        self._time(config, work, choice, phases, rehearsal)
        for name, on in base.paths.items():
            move(name, on, base.sizes[name], phases, self.machine.rates)
        make_room(base.sizes, base.paths, phases["generate"], budget, self.machine.rates)
        loading = self.sharing.here * self.each * self.shape.parameters if self.sharing.held > 1 else 0
        copies = self._copies(config, phases)
        prediction = Prediction(phases, generation, choice, self.sharing, loading)
        if self.sharing.here * copies + prediction.host > host_limit(config, self.machine.host_gib):
            return replace(prediction, waits_for=copies)
        for phase in phases.values():  # pinned before the first step
            phase.host += copies
        return prediction

    def _copies(self, config: Config, phases: Mapping[Phase, Foretold]) -> int:
        """Host memory for asynchronous saves."""
        if config.checkpoint is None or not config.checkpoint.async_save:
            return 0
        on = phases["save"].device
        return copied_bytes(on["weights"], on.get("master", 0) + on.get("moments", 0), self.shape.largest)

    def _base(self, config: Config, rehearsal: Rehearsal | None) -> _Base:
        """What does not depend on activations and packing: many configs that are tried have it in common."""
        optimizer, away = config.optimizer, config.memory.away
        rows = tuple(tuple(row) if (row := getattr(away, phase)) is not None else None for phase in PHASES)
        key = (optimizer.place, optimizer.cpu_fraction, optimizer.overlap, optimizer.state_dtype, optimizer.grad_dtype)
        whole = (*key, config.memory.preset, rows, config.loss.kl is None, config.rollout.cache, rehearsal)
        if (found := self._bases.get(whole)) is None:
            plan = build_plan(config.memory, optimizer)
            sizes, resident = self._holdings(config, optimizer=rehearsal != "none")
            if rehearsal is not None:
                sizes["grads"] = 0
            paths: dict[Name, dict[Phase, bool]] = {
                name: path(plan, name) for name in MOVABLE if name in sizes and name != "grads" and plan.ever_away(name)
            }
            # Host memory is pinned once for what is ever away, and stays.
            host = sum(resident.values()) + sum(sizes[name] for name in paths)
            found = self._bases[whole] = _Base(sizes, host, places(plan, sizes), paths)
        return found

    def choice(self, config: Config) -> Choice:
        """What `memory.activations` comes to on this machine: a run holds it against a forward of so many tokens, as it does here."""
        rollout, tokens = config.rollout, min(PROBE, config.train.microbatch_tokens)
        length = min(1024, tokens, rollout.max_prompt_tokens + rollout.max_new_tokens)
        both, _ = self._speed.update(Part(tokens, tokens), length, Choice(), 0)
        layers = max(1, self._part.layers - config.memory.activations.keep_last)
        carried = CARRIED * self.machine.rates.link_out * both / 3 / tokens / layers
        return chosen(config.memory.activations, self._part, self.each, carried, gated=self.machine.timed)

    # Memory

    def _holdings(self, config: Config, *, optimizer: bool) -> tuple[dict[Name, int], dict[str, int]]:
        """(bytes of what is on the device unless it is away, bytes that live on the host)."""
        parameters = self._held
        moving, resident = state_bytes(config.optimizer, parameters, self.each) if optimizer else ({}, {})
        sizes: dict[Name, int] = {"weights": self.each * parameters, **moving}
        on_device = parameters
        if config.optimizer.overlap:  # without those that leave in the backward; but a tensor's stay together, and with ranks a block's
            on_device -= round(config.optimizer.on_cpu * parameters)
            on_device = self._part.whole_to(on_device, self.sharing.shards, grouped=self.sharing.size > 1)
        sizes["grads"] = grad_bytes(config.optimizer, self.each) * on_device
        if config.loss.kl is not None:
            sizes["reference"] = self.each * parameters
        if config.rollout.cache == "kept":
            rollout, block = config.rollout, BLOCKS[self._kind]
            blocks = most_blocks(rollout.ahead, rollout.max_prompt_tokens, rollout.samples, rollout.max_new_tokens, block)
            sizes["kv_cache"] = blocks * block * room_of(self.shape).bytes(self.each)
        return {name: size for name, size in sizes.items() if size or name == "grads"}, resident

    def _train(self, config: Config, work: Work, choice: Choice, phase: Foretold) -> None:
        """The largest of all moments of all micro-batches: the first has no gradients before it, and a last one may be smaller."""
        packed = work.packed(config.train.microbatch_tokens, config.train.minibatches, self.sharing.data)
        # Gradients that leave in the backward are there for a moment only.
        leaving = config.optimizer.overlap and config.optimizer.on_cpu == 1.0
        whole = 0 if leaving else phase.device["grads"]
        moments = self._moments(config, packed.full, choice, 0, whole, leaving)
        for later in [packed.full] * (packed.count > 1) + ([packed.last] if packed.last else []):
            moments += self._moments(config, later, choice, whole, whole, leaving)
        grads, activations, rest, gathered = max(moments, key=sum)
        phase.device |= {"grads": round(grads), "activations": round(activations), "logits": round(rest)}
        if gathered:
            phase.device["gathered"] = round(gathered)
        parked = held(self._part, self.each, choice, config.memory.activations.keep_last).parked
        phase.host += round(1.02 * parked * config.train.microbatch_tokens) if parked else 0

    def _moments(
        self, config: Config, part: Part, choice: Choice, before: int, whole: int, leaving: bool
    ) -> list[tuple[float, float, float, float]]:
        """(gradients, activations, the rest, what is gathered) of a micro-batch in the head; in the norm before it; in the last block's backward; in the first's; and at the end, in the embedding."""
        shape, each, hidden, tokens = self._part, self.each, self.shape.hidden, part.tokens
        made = held(shape, each, choice, config.memory.activations.keep_last)
        grad = grad_bytes(config.optimizer, each)
        chunk = config.train.head_chunk_tokens
        logits = each * min(chunk, part.predicted) * shape.vocabulary
        head = 4 * shape.embedding + logits + max(logits if part.predicted > chunk else 0, each * shape.embedding)
        # Those that leave go together: one lot waits for others, and one is on its way.
        passing = 2 * grad * min(CPU_CHUNK, shape.parameters) if config.optimizer.overlap and config.optimizer.on_cpu else 0
        # The head's gradient is the first. Where the head is the embedding, autograd keeps it until the embedding's own is there, and only then does it add up or leave.
        of_head = each * shape.embedding if shape.tied or not (before or leaving) else 0
        early, late = before + of_head + passing, max(before + of_head, whole) + passing
        in_first = late - (grad * shape.block if before == 0 and not leaving else 0)
        norm_saved = (made.normed - (16 + each) * hidden) * tokens
        taken = [
            (made.blocks * tokens + norm_saved + 2 * each * hidden * part.predicted, head),
            ((made.blocks + made.normed) * tokens, 0),
            ((made.blocks + made.running + each * hidden) * tokens, 0),
            ((made.one + made.running + each * hidden) * tokens, 0),
            (each * hidden * tokens, each * shape.embedding),
        ]
        if self._gathers is None:
            grads = (before, early, early, max(early, in_first), late)
            return [(grad, *rest, 0) for grad, rest in zip(grads, taken, strict=True)]
        # Gradients are this rank's part as soon as a block's are summed: until then they are whole, the head's to the end. Where all blocks' activations are still there, a block's
        # gradients come to no more than what its backward has freed by then (benchmarks/rank_memory.py).
        gathers = self._gathers
        mine = 2 * grad * shape.block_held(self.sharing.shards) if leaving else whole
        headed = gathers.root + each * shape.embedding
        # One more tensor as wide as an MLP was there than without ranks: why is not known.
        wide = 0 if shape.experts else each * shape.mlp * tokens
        last = headed + gathers.block + gathers.next + gathers.summed_block + wide
        first = last + each * shape.block + gathers.reduced_block
        gathered = (gathers.root + gathers.next, headed + gathers.next, last, first, headed + gathers.reduced_block)
        grads = (before, before, before, mine, mine)
        found = [(grad, *rest, more) for grad, rest, more in zip(grads, taken, gathered, strict=True)]
        return [*found, (mine, 0, 0, each * shape.root_held() + gathers.reduced_root)]

    def _forward(self, config: Config, work: Work, phase: Foretold) -> None:
        """Forwards without gradient: the widest place of a block, or the head."""
        shape, each = self._part, self.each
        part = work.packed(config.train.microbatch_tokens, ranks=self.sharing.data).full
        wide = shape_width(shape)
        gathered = 2 * shape.experts_per_token * shape.hidden
        block = each * (3 * shape.hidden + 3 * wide + gathered) * part.tokens
        chunk = config.train.head_chunk_tokens
        logits = each * min(chunk, part.predicted) * shape.vocabulary * (2 if part.predicted > chunk else 1)
        head = each * shape.hidden * (part.tokens + part.predicted)
        root, inside = (self._gathers.root + self._gathers.next, self._gathers.block) if self._gathers is not None else (0, 0)
        if block + inside > head + logits:
            phase.device["activations"] = round(block)
        else:
            phase.device |= {"activations": round(head), "logits": round(logits)}
            inside = 0
        if root:
            phase.device["gathered"] = root + inside

    def _generate(self, config: Config, work: Work, phase: Foretold, budget: int) -> Generation:
        """Sets what the phase takes, and its seconds: on the ranks that train, or on those beside them that only generate."""
        beside = config.cluster.rollout_gpus if config.cluster is not None else 0
        if beside:
            alone = Foretold({"weights": self.each * self.shape.parameters})
            generation = self._sample(config, work.dealt(beside), alone, budget)
            # Put together, and end to end; a larger tensor goes alone, as it is.
            phase.device["gathered"] = max(2 * min(SENT, self.each * self.shape.parameters), self.each * self.shape.largest)
            sent = self._sent(beside)
            phase.takes(1, Spent(alone.seconds + sent, 0.0, sent, sent))
            return replace(generation, beside=alone.peak)
        if self._gathers is not None:
            phase.device["gathered"] = self._gathers.kept(config.gathering(self.sharing.held))
        return self._sample(config, work.dealt(self.sharing.size), phase, budget)

    def _sent(self, beside: int) -> float:
        """Seconds in which the weights are put together and go to so many ranks that only generate."""
        links = self.machine.links
        link = links.near if self.sharing.size + beside <= self.sharing.node else links.far
        together = self._gathers.generate("whole", 0, 0.0, self.machine.rates).seconds if self._gathers is not None else 0.0
        return together + self.each * self.shape.parameters / link

    def _sample(self, config: Config, work: Work, phase: Foretold, budget: int) -> Generation:
        """What one rank takes that generates; `work` is its own."""
        room, block, batch = room_of(self.shape), BLOCKS[self._kind], config.rollout.batch
        if config.rollout.engine == "paged":
            phase.device.pop("kv_cache", None)  # what was kept becomes a part of the cache that is made now
        prompt, rows = round(work.prompt), min(batch, work.sequences)
        least = blocks_for(prompt, block) + blocks_for(work.most_new, block)
        each_block = block * room.bytes(self.each)
        blocks: int | None = None
        roomy, floor = True, 0.0
        mean = float(rows)  # that decode at once on average: few are at their longest at the same time
        if config.rollout.engine == "paged":
            begun = work.prompts + config.rollout.ahead
            useful = useful_blocks([(prompt, work.samples)] * begun, work.most_new, batch, block)
            blocks = min(useful, room.blocks(self.each, block, self.chunk, batch, max(0, budget - phase.peak)))
            roomy, floor = blocks == useful, phase.peak + ((least + 1) * each_block + room.workspace(self.each, self.chunk, batch)) / SHARE
            if not roomy:
                own, shared = blocks_for(work.most_new, block), blocks_for(prompt, block) / work.samples
                rows = min(rows, int(blocks // (own + 1 + shared)))
                mean = max(1.0, min(mean, blocks / ((own + 1) / 2 + shared)))
            phase.device["kv_cache"] = blocks * each_block
        elif config.rollout.engine == "huggingface":
            phase.device["kv_cache"] = rows * (prompt + work.most_new) * room.bytes(self.each)
        if config.rollout.engine != "vllm":  # which has its share in every phase or none, with all that it needs
            wide = shape_width(self.shape)
            reading = self.each * min(self.chunk, work.prompts * prompt) * (3 * self.shape.hidden + 3 * wide)
            size, splits = size_for(max(1, rows)), blocks_for(work.most_new, 256) + blocks_for(prompt, 256)
            numbers = 2 * self.shape.vocabulary + 4 * self.shape.hidden + 3 * wide
            decoding = self.each * size * numbers + 4 * splits * size * self.shape.queries
            phase.device["workspace"] = max(reading, decoding) + decoding
        way, talk = config.gathering(self.sharing.held), Talk(0.0, 0.0)
        seconds = self._whole_speed.generate(work, mean, captured=way != "layers")
        if self._gathers is not None and way is not None:
            talk = self._gathers.generate(way, work.decode_passes(mean) + 1, seconds, self.machine.rates)
        phase.takes(1, Spent(seconds + talk.exposed, 0.0, talk.seconds, talk.exposed))
        return Generation(blocks, block, least, roomy, rows, floor)

    # Seconds

    def _time(self, config: Config, work: Work, choice: Choice, phases: Mapping[Phase, Foretold], rehearsal: Rehearsal | None) -> None:
        train = config.train
        updates = train.minibatches * train.epochs
        passes = (1 if config.needs_old_logprobs else 0) + (1 if config.loss.kl is not None else 0)
        phases["logprob"].takes(passes, self._looking(train.microbatch_tokens, work))
        if rehearsal is not None:
            phases["train"].takes(train.epochs, self._looking(train.microbatch_tokens, work))
        else:
            leaving = config.optimizer.on_cpu if config.optimizer.overlap else 0.0
            keep_last = config.memory.activations.keep_last
            count, update = self._updating(train.microbatch_tokens, train.minibatches, work, choice, keep_last, leaving)
            phases["train"].takes(updates, update)
            phases["train"].seconds += updates * self._speed.gathering(config.optimizer, count)
            stepped, waited = self._speed.step(config.optimizer)
            phases["step"].seconds, phases["step"].exposed = updates * stepped, updates * waited
            for phase, size in self._crossing(config, work, choice).items():
                phases[phase].moved += updates * size
        if "save" in phases:
            copied = sum(phases["save"].device.get(name, 0) for name in ("weights", "master", "moments"))
            phases["save"].seconds = phases["save"].exposed = copied / self.machine.rates.link_out
            phases["save"].moved += copied

    def _crossing(self, config: Config, work: Work, choice: Choice) -> dict[Phase, int]:
        """Bytes that cross the link in an update beside holdings that move: activations, gradients that the CPU steps by and the weights that come of it, state that is streamed."""
        optimizer, train = config.optimizer, config.train
        on_cpu = round(optimizer.on_cpu * self._held)
        packed = work.packed(train.microbatch_tokens, train.minibatches, self.sharing.data)
        parked = held(self._part, self.each, choice, config.memory.activations.keep_last).parked
        in_train = 2 * parked * sum(count * part.tokens for part, count in packed.parts)
        in_step = self.each * on_cpu
        grads = grad_bytes(optimizer, self.each) * on_cpu
        if optimizer.overlap:
            in_train += packed.passes * grads
        else:
            in_step += grads
        if optimizer.place == "streamed":
            in_step += 2 * (low_bytes(self.each) + 2 * moment_bytes(optimizer)) * (self._held - on_cpu)
        return {"train": round(in_train), "step": in_step}

    def _looking(self, tokens: int, work: Work) -> Spent:
        """On all samples once, without gradient."""
        key = tokens, work
        if (found := self._looked.get(key)) is None:
            length, packed = work.prompt + work.new, work.packed(tokens, ranks=self.sharing.data)
            seconds, talk, waited = sum(count * self._speed.logprobs(part, length) for part, count in packed.parts), 0.0, 0.0
            if self._gathers is not None:
                joined = sum(count * self._gathers.joined(part.tokens, backward=False) for part, count in packed.parts)
                blocks = joined + sum(count * self._speed.forward(part.tokens, length) for part, count in packed.parts)
                gathered = self._gathers.forward(packed.passes, blocks / packed.passes)
                talk, waited = joined + gathered.seconds, joined + gathered.exposed
            found = self._looked[key] = Spent(seconds + waited, 0.0, talk, waited)
        return found

    def _updating(self, tokens: int, minibatches: int, work: Work, choice: Choice, keep_last: int, leaving: float) -> tuple[int, Spent]:
        """(micro-batches, forwards and backwards) of a minibatch."""
        key = tokens, minibatches, work, choice, keep_last, leaving
        if (found := self._updated.get(key)) is None:
            length, packed = work.prompt + work.new, work.packed(tokens, minibatches, self.sharing.data)
            seconds, exposed, talk, waited = 0.0, 0.0, 0.0, 0.0
            for part, count in packed.parts:
                once, late = self._speed.update(part, length, choice, keep_last, leaving)
                said = self._update_talk(part, length, choice, once - late)
                seconds, exposed = seconds + count * (once + said.exposed), exposed + count * late
                talk, waited = talk + count * said.seconds, waited + count * said.exposed
            found = self._updated[key] = packed.passes, Spent(seconds, exposed, talk, waited)
        return found

    def _update_talk(self, part: Part, length: float, choice: Choice, compute: float) -> Talk:
        """Of a micro-batch's forward and backward, which take so many seconds by themselves."""
        if self._gathers is None:
            return Talk(0.0, 0.0)
        again = whole_block(self._part, choice)
        before, whole = (self._gathers.joined(part.tokens, backward=backward, again=backward and again) for backward in (False, True))
        forward = self._speed.forward(part.tokens, length)
        backward = max(0.0, compute - forward - self._speed.head(part.predicted, 4))
        found = self._gathers.update(forward + before, backward + whole - before)
        return Talk(whole + found.seconds, whole + found.exposed)


def host_limit(config: Config, host_gib: float) -> float:
    """Bytes that a run may take of a host with so much free memory."""
    budget = config.memory.host_budget_gib
    return GIB * (HOST_SHARE * host_gib if budget is None else min(budget, host_gib))


def shape_width(shape: Shape) -> int:
    """Numbers that the widest place of a block has of a token."""
    return max(shape.mlp * max(1, shape.experts_per_token), shape.dense_mlp)
