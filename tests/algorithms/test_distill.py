"""Distillation: gradients of the whole model against full logits, a student that becomes its teacher, and the same run
however it is moved or resumed."""

import json

import pytest
import torch

from conftest import TINY, merged
from ebbtide.algorithms.data import read_data
from ebbtide.algorithms.distill import Run
from ebbtide.config.roots import validate_config
from ebbtide.errors import UserError
from ebbtide.model.load import load_model
from ebbtide.model.shape import find_shape
from ebbtide.policy.datum import trajectory, weigh_by_token
from ebbtide.policy.losses.distillation import sampled_divergence
from ebbtide.worker import Worker
from example_runs import BASE, DATA, config_of, digits, resumes_to_the_bit, run, same, write_rows

SAMPLED = {"task": TINY["task"], "rollout": TINY["rollout"]}
SHORT = {"optimizer.lr": 1e-2, "train.steps": 3, "evaluate": {"every": 1, "problems": 4}}
LARGER = {"hidden": 48, "mlp": 64, "layers": 3, "tied": False}


def make_teacher(folder, **shape) -> str:
    """A wider model that looks at the token before alone: it is sure of what follows each, and soon learned."""
    scratch = {**BASE["model"]["scratch"], **LARGER, **shape}
    made = load_model(config_of("sft", {"data.train": "x", "data.max_tokens": 8, "model.scratch": scratch}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            elif "embed" in name or "lm_head" in name:
                weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def distill(tmp_path, teacher):
    """distill("folder", {...}): a config on a file's completions, or with SAMPLED on the policy's own."""
    file = write_rows(tmp_path / "data.jsonl", digits())

    def make(folder, changes=None):
        own = {} if changes and "task" in changes else {"data": {"train": file, **DATA}}
        base = {"teacher": {"path": teacher}, "run.folder": str(tmp_path / folder), **own}
        return config_of("distill", {**base, **(changes or {})})

    return make


def logprobs_of(model, tokens, temperature: float = 1.0) -> torch.Tensor:
    """[tokens, vocabulary] in float64."""
    return torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].double() / temperature, -1)


def divergence(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    if beta in (0, 1):
        p, q = (q, p) if beta == 0 else (p, q)
        return (p.exp() * (p - q)).sum(-1)
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_step_has_the_loss_and_gradients_of_full_logits(distill, beta) -> None:
    config = distill("a", {"loss.beta": beta, "train.steps": 1})
    with Worker(config) as worker:
        algorithm = Run(worker, read_data(config))
        drawn = algorithm._examples.next()
        with worker.phase("logprob") as progress:
            algorithm._ask_teacher(drawn, progress)
        with worker.phase("train") as progress:
            found = worker.forward_backward(drawn, algorithm._loss, progress)
        gradients = {name: weight.grad.clone() for name, weight in worker.policy.model.named_parameters()}
    student, master = load_model(config).model, load_model(config.model_copy(update={"model": config.teacher})).model
    per_target, logs = [], []
    for datum in drawn:
        p, q = logprobs_of(student, datum.tokens), logprobs_of(master, datum.tokens).detach()
        before = torch.tensor(datum.targets) - 1
        per_target.append(divergence(p[before], q[before], beta))
        logs.append(-(p[before].exp() * p[before]).sum(-1))
    wanted = torch.cat(per_target).mean()
    wanted.backward()
    assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["kl"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["entropy"] == pytest.approx(torch.cat(logs).mean().item(), rel=1e-5)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_give_the_written_out_policy_gradient(distill, temperature) -> None:
    config = distill("a", {**SAMPLED, "loss.over": "sampled", "rollout.temperature": temperature, "train.steps": 1})
    with Worker(config) as worker:
        data = [trajectory([2, 3, 4], [5, 6, 7][: 1 + n]) for n in range(3)]
        weigh_by_token(data)
        with worker.phase("logprob") as progress:
            worker.logprobs(data, "teacher_logprobs", progress, model="teacher")
        with worker.phase("train") as progress:
            found = worker.forward_backward(data, sampled_divergence, progress)
        gradients = {name: weight.grad.clone() for name, weight in worker.policy.model.named_parameters()}
    student, master = load_model(config).model, load_model(config.model_copy(update={"model": config.teacher})).model
    total, advantages = torch.zeros(()), []
    for datum in data:
        own = logprobs_of(student, datum.tokens, temperature)
        theirs = logprobs_of(master, datum.tokens, temperature).detach()
        for target in datum.targets:
            token = datum.tokens[target]
            advantages.append((theirs[target - 1, token] - own[target - 1, token]).item())
            total = total - advantages[-1] * own[target - 1, token] / 6
    total.backward()
    assert found["kl"] == pytest.approx(-sum(advantages) / 6, rel=1e-5)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_learns_its_teacher_from_a_file(distill, tmp_path, beta) -> None:
    steps = {"train.steps": 80, "evaluate": {"every": 80, "problems": 4}, "train.microbatch_tokens": 256}
    more = write_rows(tmp_path / "more.jsonl", digits(300))  # held-out rows have nothing new in them
    changes = {"optimizer.lr": 5e-3, "loss.beta": beta, "data.batch_size": 12, "data.train": more}
    lines, _ = run(distill("a", {**steps, **changes}))
    assert lines[-1]["evaluate/kl"] < lines[0]["evaluate/kl"] / 10
    assert lines[0]["evaluate/kl"] > 0.1  # there was something to learn


@pytest.mark.parametrize("over", ["vocabulary", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_student_learns_its_teacher_from_its_own_samples(distill, over) -> None:
    """Sampled tokens tell little each, and so a lot of them is needed."""
    steps = {"vocabulary": 60, "sampled": 150}[over]
    changes = {**SAMPLED, "loss.over": over, "train.steps": steps, "train.microbatch_tokens": 1024}
    groups = {"rollout.prompts_per_step": 8, "rollout.group_size": 4 if over == "vocabulary" else 16}
    lines, _ = run(distill("a", {**changes, **groups, "optimizer.lr": 1e-2, "report.samples_every": 0}))
    last = sum(line["kl"] for line in lines[-5:]) / 5
    assert last < lines[0]["kl"] / 10
    assert {"reward", "completion_tokens", "samples"} <= lines[0].keys()


@pytest.mark.parametrize("minibatches", [2, 3])
def test_every_update_of_a_step_is_a_mean_over_its_targets(distill, minibatches) -> None:
    """Alike on a file and on samples: more updates do not make each of them smaller."""
    for name, changes in (("file", {}), ("samples", SAMPLED)):
        whole = {**changes, "optimizer.lr": 1e-12, "train.steps": 1}
        one = run(distill(name, whole))[0][-1]
        more = run(distill(f"{name}, more", {**whole, "train.minibatches": minibatches}))[0][-1]
        assert more["updates"] == minibatches
        assert more["loss"] == pytest.approx(one["loss"], rel=0.2)  # minibatches have about as many targets
        assert more["kl"] == pytest.approx(one["kl"], rel=0.2)


CASES = {"file": {}, "samples": SAMPLED, "sampled tokens": {**SAMPLED, "loss.over": "sampled"}}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "file" else pytest.mark.slow) for case in CASES]
)
def test_a_resumed_run_is_the_run_that_never_stopped(distill, tmp_path, case) -> None:
    config = distill("x", CASES[case])
    own = {"data": config.data.model_dump()} if config.data is not None else {}
    resumes_to_the_bit("distill", tmp_path, {**SHORT, **CASES[case], **own, "teacher.path": config.teacher.path})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_teacher_is_away_where_it_does_not_compute_and_no_bit_changes(distill, tmp_path, case, tied) -> None:
    path = make_teacher(tmp_path / "teacher", tied=tied)
    whole = {**SHORT, **CASES[case], "teacher.path": path, "train.steps": 2}
    assert same(run(distill("lean", {**whole, "memory.preset": "lean"})), run(distill("kept", whole)))
    line = json.loads((tmp_path / "lean" / "metrics.jsonl").read_text().splitlines()[-1])
    there = {phase: line.get(f"device_gib/{phase}/teacher") for phase in ("generate", "logprob", "train", "step")}
    assert there.pop("logprob") > 0
    assert not any(there.values())
    assert (line["device_gib/train/teacher_head"] > 0) == (case != "sampled tokens")
    assert not line["device_gib/step/teacher_head"]


def test_the_teacher_never_changes(distill) -> None:
    config = distill("a", {**SHORT, "train.steps": 1, "memory.preset": "lean"})
    with Worker(config) as worker:
        algorithm = Run(worker, read_data(config))
        algorithm.step(1)
        frozen = worker._frozen["teacher"]._policy.model
        with worker.phase("logprob") as progress:
            algorithm._ask_teacher(algorithm._examples.held_out, progress)
            kept = load_model(config.model_copy(update={"model": config.teacher})).model.state_dict()
            assert all(torch.equal(weight, kept[name]) for name, weight in frozen.state_dict().items())
        assert not any(weight.requires_grad for weight in frozen.parameters())


def test_an_evaluation_of_a_file_and_of_a_task(distill) -> None:
    file = distill("x").data.model_dump()
    both = run(distill("both", {**SHORT, **SAMPLED, "data": file, "train.steps": 1}))[0]
    assert all({"evaluate/kl", "evaluate/pass@1"} <= line.keys() for line in both)
    assert "completion_tokens" not in both[-1]  # it trains on the file
    assert "evaluate/kl" not in run(distill("task", {**SHORT, **SAMPLED, "train.steps": 1}))[0][-1]


def test_a_rehearsal_changes_nothing(distill) -> None:
    config = distill("a", {**SHORT, "train.steps": 2})
    lines, weights = run(config, rehearsal="built")
    before = load_model(config).model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert len({line["evaluate/kl"] for line in lines}) == 1


@pytest.mark.parametrize("alphabet", ["0123456789-", "01234567=89", "0123456789=+", "0123456789"])
def test_a_teacher_of_another_vocabulary_is_refused(distill, tmp_path, alphabet) -> None:
    path = make_teacher(tmp_path / "other", alphabet=alphabet)
    with pytest.raises(UserError, match=r"teacher and the policy have different vocabularies"):
        run(distill("a", {"teacher.path": path}))


def test_a_teacher_with_more_rows_than_tokens_is_none_of_another_vocabulary(distill, tmp_path) -> None:
    path = make_teacher(tmp_path / "padded")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(20)
    model.save_pretrained(path)
    assert run(distill("a", {**SHORT, "teacher.path": path, "train.steps": 1}))[0][-1]["evaluate/kl"] > 0


def test_prompts_without_answers_are_sampled_and_not_scored(distill, tmp_path, capsys) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in digits()])
    task = {"file": {"train": prompts, "answer_field": None}, "scoring": {"workers": 1}}
    changes = {"task": task, "rollout": TINY["rollout"], "train.steps": 2, "report.samples_every": 1}
    config = distill("a", changes)
    assert config.cycle == ("generate", "logprob", "train", "step")
    lines, _ = run(config)
    assert lines[-1]["kl"] < lines[0]["kl"]
    assert {"completion_tokens", "finished", "samples", "mismatch"} <= lines[0].keys()
    assert not any("reward" in key or "passed" in key for key in lines[0])
    shown = capsys.readouterr().out
    assert "completion" in shown
    assert "reward" not in shown
    rollouts = [json.loads(line) for line in (tmp_path / "a" / "rollouts.jsonl").read_text().splitlines()]
    assert {(one["answer"], one["reward"]) for one in rollouts} == {(None, None)}


@pytest.mark.parametrize(
    ("algorithm", "evaluate", "wanted"),
    [
        ("distill", {"every": 1}, r"`task.file.answer_field: null` leaves no .*`evaluate: null`"),
        ("grpo", None, r"`task.file.answer_field: null` leaves no answers .*which GRPO trains on"),
    ],
)
def test_what_needs_scores_needs_answers(algorithm, evaluate, wanted) -> None:
    task = {"file": {"train": "x.jsonl", "answer_field": None}}
    tree = {**BASE, "algorithm": algorithm, "task": task, "rollout": TINY["rollout"], "evaluate": evaluate}
    tree |= {"teacher": {"path": "x"}} if algorithm == "distill" else {}
    with pytest.raises(ValueError, match=wanted):
        validate_config(tree)


REFUSED = {
    "nothing to train on": ({"data": None, "rollout": TINY["rollout"]}, "set `task`.*or `data`"),
    "sampled tokens of a file": ({"loss.over": "sampled"}, "`loss.over: sampled` needs completions that the policy"),
    "another divergence": ({"loss": {"over": "sampled", "beta": 0.5}}, "is the reverse KL, and `loss.beta: 0.5`"),
    "several updates": (
        {"data": None, **SAMPLED, "loss.over": "sampled", "train.minibatches": 2},
        "makes one update per step",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_each_other_are_refused(case) -> None:
    changes, wanted = REFUSED[case]
    tree = {**BASE, "algorithm": "distill", "teacher": {"path": "x"}, "data": {"train": "x", **DATA}}
    with pytest.raises(ValueError, match=wanted):
        validate_config(merged(tree, changes))


def test_hidden_states_and_the_divergence_have_rows_of_their_own(distill, tmp_path) -> None:
    evaluated = {"train.steps": 1, "evaluate": {"every": 1, "problems": 4}, "data.held_out_rows": 20}
    config = distill(
        "rows", {**evaluated, "memory.budget_gib": 1.0, "data.batch_size": 4, "train.head_chunk_tokens": 16}
    )
    run(config)
    first, last = map(json.loads, (tmp_path / "rows" / "metrics.jsonl").read_text().splitlines())
    planned = json.loads((tmp_path / "rows" / "plan.json").read_text())["phases"]
    shape = find_shape(config.model)
    logits, gradient = (4 + 4) * 16 * shape.vocabulary, 4 * shape.embedding
    assert last["device_gib/train/logits"] * 2**30 == gradient + max(logits, gradient)
    for phase in ("logprob", "train", "step"):
        # Examples are shorter than the longest that a plan is made for.
        assert 0 < last[f"device_gib/{phase}/teacher_hidden"] < planned[phase]["device_gib"]["teacher_hidden"]
    # Held-out data are scored in slices of a step's size: 20 examples have more than the plan has room for.
    stored = first["device_gib/evaluate/teacher_hidden"]
    assert stored <= planned["evaluate"]["device_gib"]["teacher_hidden"] < 20 * 4 * 48 * 8 / 2**30


def test_slices_of_held_out_data_have_the_mean_of_all(distill) -> None:
    changes = {"train.steps": 1, "evaluate": {"every": 1, "problems": 4}, "data.held_out_rows": 11}
    whole, sliced = (run(distill(f"{size}", {**changes, "data.batch_size": size}))[0][0] for size in (16, 3))
    assert sliced["evaluate/kl"] == pytest.approx(whole["evaluate/kl"], rel=1e-5)
