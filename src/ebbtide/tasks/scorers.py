"""Scorers (reward functions) by name, for problems from files: each gives a completion a reward from 0 to 1."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from ebbtide.errors import UserError

Scorer = Callable[[str, Any], float]


def exact(completion: str, answer: Any) -> float:
    """Whether the completion is the same text as the answer, except for white space around it."""
    return float(completion.strip() == str(answer).strip())


MINUS = "\N{MINUS SIGN}"
# A sign counts only without a digit before it (`10-7` ends in 7), commas only between thousands (`1,2` is two numbers).
_NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?")


def numeric(completion: str, answer: Any) -> float:
    """Whether the completion's last number is the answer: integers exactly, others to one part in a million."""
    found = _NUMBER.findall(completion.replace(MINUS, "-"))
    return float(bool(found) and _same(_number(found[-1]), _number(answer)))


def _number(text: Any) -> Decimal:
    return Decimal(str(text).strip().replace(MINUS, "-").replace(",", ""))


def _same(one: Decimal, other: Decimal) -> bool:
    """Whether two numbers are equal: integers exactly, because a large product that is off by one is wrong; others
    approximately, because 0.333333 is a third."""
    if one == one.to_integral_value() and other == other.to_integral_value():
        return one == other
    return math.isclose(one, other, rel_tol=1e-6)


def gsm8k(completion: str, answer: Any) -> float:
    """Whether completion and answer have the same final number: the one after `####`, as in GSM8K's own solutions, or
    else the last."""
    found, right = final_number(completion), final_number(str(answer))
    return float(found is not None and right is not None and _same(found, right))


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`, or the last number of a text without that mark; None if there is
    none."""
    _, mark, rest = text.replace(MINUS, "-").replace("$", "").rpartition("####")  # `-$5` is -5
    found = _NUMBER.findall(rest)
    return _number(found[0 if mark else -1]) if found else None


def regex(completion: str, answer: Any) -> float:
    """Whether the answer, a pattern, matches the whole completion."""
    return float(re.fullmatch(str(answer), completion.strip(), re.DOTALL) is not None)


def math_verify(completion: str, answer: Any) -> float:
    """Whether completion and answer are mathematically equal, as `1/2`, `\\frac{1}{2}` and `0.5` are. It uses signals,
    so it works in a process's main thread only."""
    from math_verify import parse, verify  # An optional dependency, checked by `scorer`.

    # An extracted answer has no dollar signs, by which mathematics is recognized in a text.
    return float(verify(parse(f"${answer}$"), parse(completion) or parse(f"${completion}$")))


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "numeric": numeric,
    "gsm8k": gsm8k,
    "regex": regex,
    "math_verify": math_verify,
}


def check_answer(name: str, answer: Any) -> None:
    """Checks that this scorer can use an answer; raises ValueError with what is wrong."""
    if answer is None or (name == "math_verify" and not str(answer).strip()):
        raise ValueError("there is none")
    if isinstance(answer, dict | list):
        raise ValueError("it is neither a text nor a number")
    if name == "numeric" and not _NUMBER.fullmatch(str(answer).strip().replace(MINUS, "-")):
        raise ValueError("it is not a plain number")
    if name == "gsm8k" and final_number(str(answer)) is None:
        raise ValueError("it has no number")
    if name == "regex":
        try:
            re.compile(str(answer))
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from None


def find_scorer(name: str) -> Scorer:
    """The scorer with this name; checks that its package is installed."""
    if name == "math_verify":
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise UserError(
                "`task.file.scorer: math_verify` needs the package math-verify: pip install 'ebbtide[math]'"
            ) from None
    return SCORERS[name]
