"""Environments that drive their episodes, for test_driven_episodes.py; they run in processes of their own."""

import asyncio
import json
import urllib.error
import urllib.request

from ebbtide.tasks.driving import Policy, PolicyError


def posted(policy: Policy, body: dict) -> tuple[int, dict]:
    """(status, body) of the endpoint's answer."""
    request = urllib.request.Request(f"{policy.url}/inference/v1/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class TwoTurns:
    """Asks for a turn by a call, appends a token, and asks for another over HTTP; the reward is the share of 5s."""

    def run(self, policy: Policy, seed: int):
        first = policy.sample([3, 4, 5], max_tokens=4)
        tokens = [3, 4, 5, *first.tokens, 6]
        params = {"max_tokens": 3, "stop_token_ids": policy.facts.end_tokens}
        status, found = posted(policy, {"model": "policy", "token_ids": tokens, "sampling_params": params})
        assert status == 200, found
        (choice,) = found["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        sampled = [*first.tokens, *choice["token_ids"]]
        return sampled.count(5) / len(sampled), {"length": len(sampled)}


class Forks:
    """Begins a second turn with other tokens than those of the first one."""

    async def run(self, policy: Policy):
        await policy.generate([3, 4], max_tokens=2)
        await policy.generate([7, 7, 7], max_tokens=2)
        return 1.0


class Greedy:
    """Asks for turns until it is told that there are no more."""

    def run(self, policy: Policy):
        tokens, turns = [3], 0
        try:
            while True:
                tokens = [*tokens, *policy.sample(tokens, max_tokens=1).tokens, 4]
                turns += 1
        except PolicyError as error:
            return float(turns), {"told": float("limit" in str(error))}


class Silent:
    """Never asks for anything."""

    def run(self, policy: Policy):
        return 0.5


class Raises:
    async def run(self, policy: Policy):
        await asyncio.gather(*(policy.generate([3], max_tokens=1) for _ in range(2)))
        raise ValueError("no episode today")


class Wrong:
    """Sends what the endpoint refuses."""

    def run(self, policy: Policy):
        wrong = [
            {"token_ids": []},
            {"token_ids": ["a"]},
            {"token_ids": [3], "sampling_params": {"stop_token_ids": [9]}},
            {"token_ids": [3], "sampling_params": {"n": 2}},
            {"token_ids": [3], "sampling_params": {"max_tokens": 0}},
            [],
        ]
        found = [posted(policy, body) for body in wrong]
        assert all(status == 400 and body["error"]["message"] for status, body in found), found
        with urllib.request.urlopen(f"{policy.url}/v1/models") as answer:
            (card,) = json.load(answer)["data"]
        assert card["max_model_len"] == policy.facts.max_model_len
        return float(len(found))
