"""The datum: any mask over any number of turns, groups that stay together, values in any form, losses of one's own."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.algorithms.loop import train
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.partition import balance
from ebbtide.policy.datum import Datum, idle_datum, per_target, weigh_by_token
from ebbtide.policy.losses import Ratio
from ebbtide.policy.packing import pack
from ebbtide.policy.policy import Policy
from ebbtide.progress import no_progress
from ebbtide.report.report import Report
from example_runs import config_of

CPU = torch.device("cpu")
MASKS = ["...xx..xxx", "....x", "..x.x.x.x.x", ".xxxxxxx", ".....xx...", "....xxx..x.."]


@pytest.fixture(scope="module")
def loaded():
    loaded = load_model(config_of("sft", {"data.train": "x", "data.max_tokens": 32}))
    generator = torch.Generator().manual_seed(1)
    for parameter in loaded.model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return loaded


def masked(seed: int = 0) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Datum.masked(torch.randint(13, (len(mask),), generator=generator).tolist(), [one == "x" for one in mask])
        for mask in MASKS
    ]


def policy_of(loaded, budget: int, comm: Comm | None = None) -> Policy:
    settings = {"data.train": "x", "data.max_tokens": 16, "train.microbatch_tokens": budget}
    return Policy(loaded, config_of("sft", settings), comm)


class Share(Comm):
    """One of so many ranks, alone: what it would compute."""

    def __init__(self, rank: int, size: int, rounds: int = 0) -> None:
        self.rank, self.size, self.rounds = rank, size, rounds

    def local_share(self, sizes):
        return balance(sizes, self.size)[self.rank]

    def max_rounds(self, mine: int) -> int:
        return max(mine, self.rounds)


@pytest.mark.parametrize("budget", [16, 32, 512])
def test_log_probs_of_any_mask_are_those_of_a_padded_forward(loaded, budget) -> None:
    data, model = masked(), loaded.model
    policy_of(loaded, budget).compute_logprobs("found", data, no_progress)
    longest = max(len(datum.tokens) for datum in data)
    ids = torch.tensor([datum.tokens + [0] * (longest - len(datum.tokens)) for datum in data])
    attended = torch.tensor([[1] * len(datum.tokens) + [0] * (longest - len(datum.tokens)) for datum in data])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids, attention_mask=attended, use_cache=False).logits, -1)
    for number, (datum, mask) in enumerate(zip(data, MASKS, strict=True)):
        targets = [place for place, one in enumerate(mask) if one == "x"]
        assert list(datum.targets) == targets
        wanted = torch.stack([logprobs[number, place - 1, datum.tokens[place]] for place in targets])
        torch.testing.assert_close(datum.values["found"], wanted, rtol=1e-5, atol=1e-5)


DATA = st.lists(st.tuples(st.integers(1, 20), st.sampled_from([None, None, 0, 1, 2, 3])), min_size=1, max_size=24)


@settings(deadline=None, max_examples=60)
@given(DATA, st.integers(0, 60), st.integers(1, 5))
def test_groups_stay_in_one_micro_batch_and_on_one_rank(loaded, lengths, room, ranks) -> None:
    data = [Datum([1] * (length + 1), [length], group=group) for length, group in lengths]
    groups = {group: [d.length for d in data if d.group == group] for _, group in lengths if group is not None}
    budget = room + max([*(sum(some) for some in groups.values()), *(datum.length for datum in data)])
    seen: list[int] = []
    for rank in range(ranks):
        mine, batches = policy_of(loaded, max(16, budget), Share(rank, ranks))._local_share(data)
        seen += mine
        assert sorted(member for batch in batches for member in batch.members) == list(range(len(mine)))
        for batch in batches:
            assert batch.token_ids.numel() <= max(16, budget)
            here = [data[mine[member]].group for member in batch.members]
            for group in {*here} - {None}:
                assert here.count(group) == len(groups[group])
                first = here.index(group)
                assert here[first : first + here.count(group)] == [group] * here.count(group)  # side by side
                members = [mine[member] for member in batch.members if data[mine[member]].group == group]
                assert members == sorted(members)  # and in their order
    assert sorted(seen) == list(range(len(data)))


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack([Datum([1] * 9, [8], group=0) for _ in range(2)], 15, CPU)


def test_a_rank_without_work_computes_a_pair_where_the_data_are_pairs(loaded) -> None:
    pair = [Datum([1, 2, 3], [1, 2], {"hidden": torch.ones(2, 7), "weights": 0.5}, group=4) for _ in range(2)]
    mine, batches = policy_of(loaded, 16, Share(1, 2, rounds=2))._local_share(pair)
    assert mine == []
    assert [batch.members for batch in batches] == [[0, 0], [0, 0]]
    assert batches[0].lengths == [1, 1]
    idle = idle_datum(pair[0])
    values = per_target([idle, idle], ["hidden", "weights"], batches[0].sequence, CPU)
    assert values["hidden"].tolist() == [[0.0] * 7] * 2
    assert values["weights"].tolist() == [0.0, 0.0]

    def loss(inputs):
        assert inputs.sequences == 2
        assert inputs["hidden"].shape == (2, 7)
        return inputs.logprobs.sum() * torch.inf, {"odd": Ratio(torch.tensor(5.0), torch.tensor(1.0))}

    loaded.model.zero_grad()
    found = policy_of(loaded, 16, Share(1, 2, rounds=2)).forward_backward(pair, loss, no_progress)
    assert found == {"loss": 0.0, "entropy": 0.0, "odd": 0.0}
    assert not any(parameter.grad.any() for parameter in loaded.model.parameters())
    loaded.model.zero_grad()


def weighted(inputs):
    return (inputs.logprobs * inputs["scores"] * inputs["weights"]).sum()


FORMS = {
    "numbers": lambda value, count: value,
    "lists": lambda value, count: [value] * count,
    "tensors": lambda value, count: torch.full((count,), value),
}


def test_values_may_be_numbers_or_lists_or_tensors_or_a_mixture(loaded) -> None:
    found = {}
    for name in (*FORMS, "mixture"):
        data = masked()
        weigh_by_token(data)
        for number, datum in enumerate(data):
            form = FORMS[name] if name != "mixture" else list(FORMS.values())[number % 3]
            datum.values["scores"] = form(0.5 - number, len(datum.targets))
        loaded.model.zero_grad()
        figures = policy_of(loaded, 32).forward_backward(data, weighted, no_progress)
        found[name] = figures, [parameter.grad.clone() for parameter in loaded.model.parameters()]
    loaded.model.zero_grad()
    for figures, gradients in found.values():
        assert figures == found["numbers"][0]
        assert all(torch.equal(one, other) for one, other in zip(gradients, found["numbers"][1], strict=True))


def test_values_of_each_target_stay_with_it(loaded) -> None:
    data = masked()
    for number, datum in enumerate(data):
        datum.values["own"] = [float(100 * number + target) for target in datum.targets]
        datum.values["rows"] = torch.tensor([[number, target] for target in datum.targets])
    seen = []

    def loss(inputs):
        numbers = inputs["own"].div(100, rounding_mode="floor")
        assert torch.equal(inputs["rows"], torch.stack([numbers, inputs["own"] % 100], 1).long())
        assert len({*zip(inputs.sequence.tolist(), numbers.tolist(), strict=True)}) == inputs.sequences
        seen.extend(inputs["own"].tolist())
        return inputs.logprobs.sum()

    policy_of(loaded, 16).forward_only(data, loss, no_progress)
    assert sorted(seen) == [value for datum in data for value in datum.values["own"]]


@pytest.mark.parametrize(
    "targets", [[], [0], [0, 2], [4], [1, 4], [-1], [2, 1], [1, 1, 2], range(3, 0, -1), range(4, 4)]
)
def test_bad_targets_are_refused(targets) -> None:
    with pytest.raises(ValueError, match=r"positions from 1 to 3 of its 4 tokens"):
        Datum([5, 6, 7, 8], targets)


def test_targets_may_be_a_range_with_steps() -> None:
    (batch,) = pack([Datum([5, 6, 7, 8, 9], range(1, 5, 2))], 16, CPU)
    assert batch.targets.tolist() == [6, 8]
    assert batch.predict.tolist() == [0, 2]


def test_masks_and_values_of_another_length_are_refused(loaded) -> None:
    with pytest.raises(ValueError, match="the mask has 2 entries for 3 tokens"):
        Datum.masked([1, 2, 3], [False, True])
    for value in ([1.0], torch.ones(3)):
        datum = Datum([1, 2, 3], [1, 2], {"scores": value, "weights": 1.0})
        with pytest.raises(ValueError, match=rf"the value `scores` of a datum has {len(value)} entries for 2 targets"):
            policy_of(loaded, 16).forward_only([datum], weighted, no_progress)


def test_a_value_that_a_loss_lacks_is_named(loaded) -> None:
    with pytest.raises(KeyError, match="not all data have the value `scores`; all have: other"):
        policy_of(loaded, 16).forward_only([Datum([1, 2], [1], {"other": 1.0})], weighted, no_progress)


@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("lacks", [0, 3])
def test_a_value_that_one_datum_lacks_is_left_out_of_all_micro_batches(loaded, budget, lacks) -> None:
    data = masked()
    for datum in data:
        datum.values |= {"rollout_logprobs": [-1.0] * len(datum.targets), "weights": 1.0}
    del data[lacks].values["rollout_logprobs"]
    seen = []

    def loss(inputs):
        seen.append(set(inputs.values))
        return inputs.logprobs.sum()

    found = policy_of(loaded, budget).forward_only(data, loss, no_progress)
    assert seen == [{"weights"}] * len(seen)
    assert found.keys() == {"loss", "entropy"}  # and no mismatch of some of them


@pytest.mark.parametrize("budget", [16, 512])
def test_ratios_are_divided_after_summing_over_micro_batches(loaded, budget) -> None:
    def loss(inputs):
        firsts = inputs.sequence_sum(torch.ones_like(inputs.logprobs))
        sequences = torch.tensor(float(inputs.sequences))
        nothing = torch.zeros(())
        reported = {
            "length": Ratio(firsts.sum(), sequences),
            "none": Ratio(nothing, nothing),
            "targets": torch.ones_like(inputs.logprobs).sum(),
            "longest_max": firsts.max(),
        }
        return inputs.logprobs.sum() * 0, reported

    lengths = [mask.count("x") for mask in MASKS]
    found = policy_of(loaded, budget).forward_only(masked(), loss, no_progress)
    assert found["length"] == pytest.approx(sum(lengths) / len(lengths))
    assert (found["none"], found["targets"], found["longest_max"]) == (0.0, 1.0, max(lengths))


# A loss of one's own

LOSSES = """
import torch
from ebbtide.policy.losses import Ratio

def reinforce(inputs):
    found = -inputs["advantages"] * inputs.logprobs
    ones = torch.ones(inputs.sequences)
    return found, {"surprise": -inputs.logprobs.detach().sum(), "sequences": Ratio(ones.sum(), torch.tensor(1.0))}

def plain(inputs):
    return -inputs["advantages"] * inputs.logprobs

def scalar(inputs):
    return inputs.logprobs.sum()

class WithHead:
    # Twice the log-probs, which it computes from the logits itself.

    def head(self, hidden, head, targets, values):
        assert "advantages" in values
        logprobs = head.shaped(head.raw(hidden, head.vocabulary)).log_softmax(-1)
        chosen = logprobs.gather(-1, targets[:, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return {"logprobs": chosen, "entropies": entropies, "twice": 2 * chosen}

    def __call__(self, inputs):
        return -inputs["advantages"] * inputs["twice"] / 2

with_head = WithHead()

def without_entropies(inputs): ...
without_entropies.head = lambda hidden, head, targets, values: {"logprobs": targets}

number = 5
"""


@pytest.fixture
def own(tmp_path, monkeypatch, tiny):
    """own("reinforce"): the lines of a GRPO run with that loss."""
    (tmp_path / "own_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)

    def run(kind, **changes):
        config = tiny({"loss.kind": kind, "run.folder": str(tmp_path / "run"), "checkpoint": None, **changes})
        with Report(config, "test") as report:
            train(config, report)
        return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    yield run
    sys.modules.pop("own_losses", None)


def test_a_loss_of_ones_own_trains_and_reports(own) -> None:
    lines = own("own_losses:reinforce", **{"train.microbatch_tokens": 16, "loss.kl": {"coefficient": 0.1}})
    assert len(lines) == 2
    for line in lines:
        assert line["surprise"] > 0
        assert 1 <= line["sequences"] <= 4  # of a micro-batch, on average
        assert "kl" in line  # what the config adds to a loss is there as well
        assert "clip_fraction" not in line
        assert line["grad_norm"] > 0


def test_a_loss_may_report_nothing(own) -> None:
    assert own("own_losses:plain")[-1]["grad_norm"] > 0


def test_a_loss_of_ones_own_may_compute_with_the_logits(own) -> None:
    changes = {"loss.kl": {"coefficient": 0.1}, "run.overwrite": True}
    plain, computed = own("own_losses:plain", **changes)[-1], own("own_losses:with_head", **changes)[-1]
    for name in ("loss", "entropy", "grad_norm", "kl", "mismatch"):
        assert computed[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-6), name


def test_a_head_that_computes_no_entropies_is_refused(own) -> None:
    with pytest.raises(ValueError, match=r"has to return `logprobs` and `entropies`, and lacks {'entropies'}"):
        own("own_losses:without_entropies")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("own_losses:scalar", r"returned a tensor of shape \(\): .* the loss of each target"),
        ("own_losses:absent", "has no attribute 'absent'"),
        ("no_such_losses:reinforce", "No module named 'no_such_losses'"),
        ("own_losses:number", "is a int, and should be a function"),
    ],
)
def test_what_is_no_loss_is_refused_by_its_name(own, kind, why) -> None:
    with pytest.raises(UserError, match=rf"`loss.kind: {kind}` .*{why}"):
        own(kind)
