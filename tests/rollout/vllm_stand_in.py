"""What the engine uses of vLLM, by transformers: a model with weights of its own, which it gets by name. It samples
token by token, and computes everything anew for each."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class StandIn:
    """A module in place of `vllm`. One at a time: `engines` has those that were made."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.SamplingParams = SimpleNamespace
        self.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0))

    def LLM(self, folder: str, **settings: Any) -> Any:  # noqa: N802 (vLLM's name)
        self.engines.append(Engine(folder, settings))
        return SimpleNamespace(llm_engine=self.engines[-1])


class Engine:
    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        kind = getattr(torch, settings["dtype"])
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=kind).eval()
        self.loaded = 0
        self._requests: list[Any] = []

    def wake_up(self, tags: list[str]) -> None: ...

    def sleep(self, level: int) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        assert name == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))  # strict: all names, and no other
        self.loaded += 1

    def add_request(self, number: str, prompt: dict[str, list[int]], params: Any) -> None:
        self._requests.append((number, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @torch.no_grad()
    def step(self) -> list[Any]:
        """Finishes one request."""
        number, prompt, params = self._requests.pop()
        generator, tokens, logprobs = torch.Generator().manual_seed(params.seed), [], []
        while len(tokens) < params.max_tokens and not {*tokens[-1:]} & {*params.stop_token_ids}:
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1)
            greedy = params.temperature == 0
            token = logits.argmax() if greedy else torch.multinomial(logits.exp(), 1, generator=generator)
            tokens.append(int(token))
            logprobs.append(float(logits[token]))
        reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
        done = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs), finish_reason=reason)
        return [SimpleNamespace(request_id=number, finished=True, outputs=[done])]
