"""A page that is open in Chromium, and how a test reads it and acts on it."""

from __future__ import annotations

import csv
from typing import Any
from urllib.parse import parse_qs

from patience import PATIENCE

PAGE_PATIENCE = 1000 * PATIENCE  # milliseconds


class Looked:
    """A page, and what it did beside drawing."""

    def __init__(self, chromium: Any, address: str, **context: Any) -> None:
        self.page = chromium.new_page(**({"viewport": {"width": 1280, "height": 900}} | context))
        self.page.set_default_timeout(PAGE_PATIENCE)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn]")

    def chart(self, metric: str) -> Any:
        """A metric's chart, when it is drawn."""
        found = self.page.locator(f"figure[data-metric='{metric}'] .chart.js-plotly-plot")
        found.wait_for()
        return found

    def metrics(self) -> list[str]:
        return self.page.locator("#curves figure").evaluate_all("all => all.map(one => one.dataset.metric)")

    def traces(self, chart: Any) -> dict[str, Any]:
        """Name -> y of what Plotly has drawn in a chart."""
        found = chart.evaluate("one => one.data.map(trace => [trace.name, Array.from(trace.y)])")
        return dict(reversed(found))

    def first(self, metric: str, what: str = "y") -> Any:
        return self.chart(metric).evaluate("(one, what) => Array.from(one.data[0][what])", what)

    def at(self, view: str) -> None:
        """The page as a link with this view shows it."""
        self.page.evaluate(
            "view => { history.replaceState(null, '', '#' + view); dispatchEvent(new HashChangeEvent('hashchange')); }",
            view,
        )

    def view(self) -> dict[str, list[str]]:
        """What the address says, once it says something else than before."""
        self.page.wait_for_function("() => address() === location.hash")
        return parse_qs(self.page.evaluate("location.hash.slice(1)"))

    def open(self, number: int) -> Any:
        """Opens a prompt of the list; what is inside comes with the next event."""
        self.page.locator("#samples summary").nth(number).click()
        return self.inside(number)

    def inside(self, number: int) -> Any:
        inside = self.page.locator("#samples li").nth(number).locator(".inside")
        inside.wait_for()
        return inside

    def listed(self) -> list[str]:
        return [line.replace("\n", " ") for line in self.page.locator("#samples summary").all_inner_texts()]

    def csv(self, button: str) -> list[list[str]]:
        with self.page.expect_download() as caught:
            self.page.click(button)
        with open(caught.value.path(), newline="", encoding="utf-8") as file:
            return list(csv.reader(file))
