"""Environments that drive their episodes, for test_driven_episodes.py; they run in processes of their own."""

import asyncio
import json
import threading
import urllib.error
import urllib.request

from ebbtide.tasks.policy_endpoint import ServedPolicy
from ebbtide.tasks.policy_handle import PolicyError


def posted(policy: ServedPolicy, body: object, path: str = "inference/v1/generate") -> tuple[int, dict]:
    """(status, body) of the endpoint's answer."""
    request = urllib.request.Request(f"{policy.url}/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class TwoTurns:
    """Asks for a turn by a call, appends a token, and asks for another over HTTP; the reward is the share of 5s."""

    def run(self, policy: ServedPolicy, seed: int):
        first = policy.sample([3, 4, 5], max_tokens=4)
        tokens = [3, 4, 5, *first.tokens, 6]
        params = {"max_tokens": 3, "stop_token_ids": policy.facts.end_tokens}
        status, found = posted(policy, {"model": "policy", "token_ids": tokens, "sampling_params": params})
        assert status == 200, found
        (choice,) = found["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        sampled = [*first.tokens, *choice["token_ids"]]
        return sampled.count(5) / len(sampled), {"length": len(sampled)}


class Chats:
    """An agent of OpenAI's chat completions: two turns over HTTP, the second one after the first."""

    def run(self, policy: ServedPolicy):
        messages = [{"role": "user", "content": "12"}]
        for said in ("3", "4"):
            body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 3}).encode()
            with urllib.request.urlopen(f"{policy.url}/v1/chat/completions", body) as answer:
                (choice,) = json.load(answer)["choices"]
            messages += [{**choice["message"], "refusal": None}, {"role": "user", "content": said}]
        return float(len(messages))


class Edits:
    """An agent that changes what the policy said before it goes on."""

    def run(self, policy: ServedPolicy):
        messages = [{"role": "user", "content": "12"}]
        policy.chat(messages, max_tokens=2)
        policy.chat(
            [*messages, {"role": "assistant", "content": "777"}, {"role": "user", "content": "3"}], max_tokens=2
        )
        return 1.0


class Forks:
    """Begins a second turn with other tokens than those of the first one."""

    async def run(self, policy: ServedPolicy):
        await policy.generate([3, 4], max_tokens=2)
        await policy.generate([7, 7, 7], max_tokens=2)
        return 1.0


class Greedy:
    """Asks for turns until it is told that there are no more."""

    def run(self, policy: ServedPolicy):
        tokens, turns = [3], 0
        try:
            while True:
                tokens = [*tokens, *policy.sample(tokens, max_tokens=1).tokens, 4]
                turns += 1
        except PolicyError as error:
            return float(turns), {"told": float("limit" in str(error))}


class Silent:
    """Never asks for anything."""

    def run(self, policy: ServedPolicy):
        return 0.5


class Raises:
    async def run(self, policy: ServedPolicy):
        await asyncio.gather(*(policy.generate([3], max_tokens=1) for _ in range(2)))
        raise ValueError("no episode today")


class Wrong:
    """Sends what the endpoint refuses."""

    def run(self, policy: ServedPolicy):
        wrong = [
            {"token_ids": []},
            {"token_ids": ["a"]},
            {"token_ids": [3], "sampling_params": {"stop_token_ids": [9]}},
            {"token_ids": [3], "sampling_params": {"n": 2}},
            {"token_ids": [3], "sampling_params": {"max_tokens": 0}},
            [],
            {"messages": [], "stream": True},
            {"messages": "hello"},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ]
        paths = ["inference/v1/generate"] * 6 + ["v1/chat/completions"] * 3
        found = [posted(policy, body, path) for body, path in zip(wrong, paths, strict=True)]
        assert all(status == 400 and body["error"]["message"] for status, body in found), found
        with urllib.request.urlopen(f"{policy.url}/v1/models") as answer:
            (card,) = json.load(answer)["data"]
        assert card["max_model_len"] == policy.facts.max_model_len
        return float(len(found))


class Threads:
    """Counts the threads of its process."""

    def run(self, policy: ServedPolicy):
        policy.sample([3], max_tokens=1)
        assert policy.url
        return float(threading.active_count())


class Insists:
    """Says too much, is refused, and goes on with the whole conversation and fewer words."""

    def run(self, policy: ServedPolicy):
        messages = [{"role": "user", "content": "12"}]
        said, _ = policy.chat(messages, max_tokens=2)
        try:
            policy.chat([*messages, said, {"role": "user", "content": "3" * 40}], max_tokens=2)
        except PolicyError:
            policy.chat([*messages, said, {"role": "user", "content": "3"}], max_tokens=2)
        return 1.0


class Unrelated:
    """Asks for turns after prompts that have nothing to do with each other, until it gets none."""

    def run(self, policy: ServedPolicy):
        sampled, number = 0, 0
        try:
            while True:
                number += 1
                sampled += len(policy.sample([3 + number % 2] * 8, max_tokens=5).tokens)
        except PolicyError:
            return float(sampled)
