"""The colours of runs: told apart by every eye, and from the card that they are drawn on, in light and in dark."""

import re
from importlib.resources import files
from itertools import combinations, product

import pytest

# What an eye without one kind of cone makes of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no medium": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no short": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
LEAST_APART = 15.0  # in CIE L*a*b*, where 2.3 is just noticed side by side: these are thin lines across each other
LEAST_CONTRAST = 3.0  # of WCAG, for what is no text


def linear(colour: str) -> list[float]:
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def luminance(colour: str) -> float:
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def seen(colour: str, eye: str) -> tuple[float, float, float]:
    """L*, a* and b*."""
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * share for weight, share in zip(row, linear(colour), strict=True))))
        for row in EYES[eye]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_are_told_apart_by_every_eye(scheme) -> None:
    light, _, rest = (
        files("ebbtide.report.page").joinpath("page.css").read_text().partition("@media (prefers-color-scheme: dark)")
    )
    style = light if scheme == "light" else rest.partition("* {")[0]
    colours = re.findall(r"--run-\d: (#[0-9a-f]{6});", style)
    (card,) = re.findall(r"--card: (#[0-9a-f]{6});", style)
    assert len(colours) == 6
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(card)))
        assert (high + 0.05) / (low + 0.05) >= LEAST_CONTRAST, colour
    for eye, (one, other) in product(EYES, combinations(colours, 2)):
        apart = sum((a - b) ** 2 for a, b in zip(seen(one, eye), seen(other, eye), strict=True)) ** 0.5
        assert apart >= LEAST_APART, (eye, one, other)
