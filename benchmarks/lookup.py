"""What would shorten the tail of a step, when few samples are left: speculation from the texts of a group's other
samples, or partial rollouts. On a CPU, with real completions of GSM8K's problems.

    python benchmarks/lookup.py MODEL PROBLEMS.jsonl TOKENS.json

8 samples for each of 6 problems, at temperature 1, of at most 1,024 tokens; they are kept in TOKENS.json, and read from
there if it exists. Lookup: for the newest tokens of a sample, two at least, the last place is sought where the others
of its group, or itself, have the same, and what follows there, 8 tokens at most, is verified along with the next token.
As many of them are right as are the same tokens that were sampled, since sampling from the same uniform numbers gives
the same text. A pass that verifies 9 tokens is counted as one, which is the best case. Partial rollouts have as many
passes as if all samples had the mean length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common import Row, save

PROBLEMS, SAMPLES, LIMIT = 6, 8, 1024
LEAST, LONGEST, DRAFT = 2, 8, 8  # tokens that are the same, and that are taken from there
FEW = 4  # A tail is where this part of the batch is left, or less.

Texts = Sequence[Sequence[int]]


def completions(model: str, problems: Path) -> list[list[list[int]]]:
    """The tokens of each sample of each problem."""
    from ebbtide.config import load
    from ebbtide.model.load import load_model
    from ebbtide.rollout.engine import Request, SamplingParams
    from ebbtide.rollout.paged.engine import PagedEngine

    data = str(problems.resolve())
    options = [f"model.path={model}", "device=cpu", f"task.file.train={data}", f"task.file.held_out={data}"]
    config = load("gsm8k", [*options, "model.dtype=float32"])
    assert config.task is not None
    loaded = load_model(config)
    requests = []
    for number, line in enumerate(problems.read_text().splitlines()[:PROBLEMS]):
        told = [{"role": "system", "content": config.task.system}]
        told.append({"role": "user", "content": json.loads(line)["question"]})
        prompt = loaded.tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=True)["input_ids"]
        requests.append(Request(prompt, [SAMPLES * number + index for index in range(SAMPLES)]))
    engine = PagedEngine(loaded, PROBLEMS * SAMPLES)
    groups = engine.generate(requests, SamplingParams(LIMIT), lambda done, of: print(f"{done} of {of}", end="\r"))
    return [[one.tokens for one in group] for group in groups]


def draft(text: Sequence[int], others: Texts) -> Sequence[int]:
    """What follows the longest of the text's ends that the others have, or the text itself, further up."""
    for length in range(min(LONGEST, len(text)), LEAST - 1, -1):
        end = list(text[-length:])
        for known in (*others, text[:-1]):
            for at in range(len(known) - length - 1, -1, -1):
                if list(known[at : at + length]) == end:
                    return known[at + length : at + length + DRAFT]
    return []


def passes_by_lookup(group: Texts, tail: int) -> tuple[int, int]:
    """(tokens of the samples that are left after `tail` of them, passes that these take, one sample after another)."""
    tokens = passes = 0
    for number, text in enumerate(group):
        at = tail
        while at < len(text):
            known = [one[:at] if len(one) > at else one for index, one in enumerate(group) if index != number]
            found = draft(text[:at], known)
            right = 0
            while right < len(found) and at + right < len(text) and found[right] == text[at + right]:
                right += 1
            taken = min(right + 1, len(text) - at)
            tokens, passes, at = tokens + taken, passes + 1, at + taken
    return tokens, passes


def main() -> None:
    model, problems, kept = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if not kept.exists():
        kept.write_text(json.dumps(completions(model, problems)))
    groups = json.loads(kept.read_text())
    lengths = sorted(len(text) for group in groups for text in group)
    longest, few = lengths[-1], len(lengths) // FEW
    tail = lengths[-few - 1]  # from here on so few are left
    tokens, passes = map(sum, zip(*(passes_by_lookup(group, tail) for group in groups), strict=True))
    each = tokens / passes
    case = "GSM8K, 6 x 8 samples"
    rows = [
        Row(case, "mean length", sum(lengths) / len(lengths), "tokens"),
        Row(case, "passes until the last sample ends", longest, ""),
        Row(case, f"of these with a {FEW}th of the samples or fewer", longest - tail, ""),
        Row(case, "tokens of a sample in a pass with lookup", each, "tokens"),
        Row(case, "passes with lookup in the tail", tail + (longest - tail) / each, ""),
        Row(case, "passes with partial rollouts", sum(lengths) / len(lengths), ""),
    ]
    save("lookup", rows)


if __name__ == "__main__":
    main()
