"""A taskset of verifiers, and a harness of two turns, for test_verifiers.py; imported by the Python of `verifiers`."""

from collections.abc import Iterable

import httpx
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        """The share of replies that have a 1."""
        replies = [message.content or "" for message in trace.messages if message.role == "assistant"]
        return sum("1" in reply for reply in replies) / max(1, len(replies))


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterable[Sum]:
        for number in range(8):
            yield Sum(Data(prompt=f"{number}+{number}=", answer=str(2 * number)), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages, "max_tokens": 6}
                answer = await client.post(
                    f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(1, "", answer.text)
                messages.append(answer.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": "again"})
        return vf.ProgramResult(0, "", "")


__all__ = ["Sums", "TwoTurns"]
