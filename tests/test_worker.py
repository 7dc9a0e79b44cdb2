"""The worker's verbs, as docs/api.md describes them."""

import pytest

from ebbtide.policy.datum import Datum
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.worker import Worker

PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8])


def test_a_session_gives_the_samples_of_one_call(tiny) -> None:
    requests = [Request(prompt, [7, 8]) for prompt in PROMPTS]
    sampling = SamplingParams(max_new_tokens=6)
    with Worker(tiny({"checkpoint": None})) as worker, worker.phase("generate"):
        together = worker.sample(requests, sampling)
        with worker.session() as session:
            first = session.add(requests[0], sampling)
            session.step()
            groups = [first, session.add(requests[1], sampling)]  # while the first is under way
            while not session.finished:
                session.step()
            texts = [[state.completion().text for state in group] for group in groups]
            assert texts == [[one.text for one in group] for group in together]
            assert session.max_tokens >= 2 * 9


def test_a_session_has_room_for_the_longest_sample_alone(tiny) -> None:
    with (
        Worker(tiny({"checkpoint": None, "rollout.max_num_seqs": 1})) as worker,
        worker.phase("generate"),
        worker.session(max_tokens=20) as session,
    ):
        (state,) = session.add(Request([1] * 10, [0]), SamplingParams(max_new_tokens=10, min_p=0.0))
        while not session.finished:
            session.step()
        assert state.finish is not None


def test_a_sampler_without_sessions_says_so(tiny) -> None:
    with (
        Worker(tiny({"checkpoint": None, "rollout.engine": "huggingface"})) as worker,
        pytest.raises(TypeError, match=r"needs `rollout\.engine: paged`, and the engine is"),
        worker.session(),
    ):
        pass


def test_a_phase_or_a_model_that_the_run_does_not_have(tiny) -> None:
    with Worker(tiny({"checkpoint": None})) as worker:
        with pytest.raises(ValueError, match="`training` is no phase of `algorithm: grpo`"), worker.phase("training"):
            pass
        with pytest.raises(ValueError, match="`teacher` is no model of this run"):
            worker.logprobs([Datum.completion([1], [2])], "logprobs", model="teacher")
