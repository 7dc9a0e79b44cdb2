"""The page in a real Chromium: it draws, it filters, it goes on while the run does, and nothing that a model wrote is ever more than text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.report.page.build import write
from made_run import CHROMIUM, PHASES, append, made_run, metrics_line, plan, sample_line, serving

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 <b>bold</b> &lt; %{x}"

NAME = "<b>bold<img src=x onerror='window.hacked = 1'> &lt;"  # of a phase or a holding, which has no slash


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Looked:
    """A page, and what it did beside drawing."""

    def __init__(self, chromium: Any, address: str, **context: Any) -> None:
        self.page = chromium.new_page(**({"viewport": {"width": 1280, "height": 900}} | context))
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn]")

    def traces(self, chart: str) -> dict[str, Any]:
        """Name -> y of what Plotly has drawn in a chart."""
        found = self.page.evaluate("id => document.getElementById(id).data.map(trace => [trace.name, Array.from(trace.y)])", chart)
        return dict(reversed(found))

    def open(self, number: int) -> Any:
        """Opens a sample of the list; what is inside comes with the next event."""
        self.page.locator("#samples summary").nth(number).click()
        return self.inside(number)

    def inside(self, number: int) -> Any:
        inside = self.page.locator("#samples li").nth(number).locator(".inside")
        inside.wait_for()
        return inside

    def listed(self) -> list[str]:
        return self.page.locator("#samples summary").all_inner_texts()


@pytest.fixture
def look(chromium, tmp_path):
    """look(run, ...): the page of these runs as a file."""
    opened = []

    def open_page(*folders: Path, **context: Any) -> Looked:
        out = tmp_path / "page.html"
        write(folders, out)
        opened.append(Looked(chromium, out.as_uri(), **context))
        return opened[-1]

    yield open_page
    for looked in opened:
        looked.page.close()


def test_it_draws_without_a_word_or_a_request(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", 5, planned=True))
    assert looked.said == []
    assert [address for address in looked.asked if not address.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
    text = looked.page.inner_text("body")
    for words in ("5 of 5", "model qwen3 from scratch", "reward", "20 of 20 samples match", "13 GiB"):
        assert words in text


def test_every_chart_has_its_data(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", 5))
    assert looked.traces("reward") == {"reward": [round(1 - 0.9**step, 4) for step in range(1, 6)], "held-out reward": [0.05]}
    assert looked.traces("loss")["loss"] == pytest.approx([-0.05 / step for step in range(1, 6)], rel=1e-5)
    assert looked.traces("metric")["entropy"] == pytest.approx([2 / step for step in range(1, 6)], rel=1e-5)
    assert looked.traces("memory-0") == {
        name: [gib] * 5 for name, gib in {"weights": 3.0, "grads": 1.5, "moments": 6.0, "other": 2.5}.items()
    }
    seconds = looked.traces("seconds-0")
    assert seconds["compute"] == pytest.approx([0.85, 0.15, 0.35, 1.25, 0.2])
    assert seconds["exposed"] == pytest.approx([0, 0, 0, 0, 0.05])
    for chart in ("reward", "loss", "metric"):
        assert looked.page.locator(f"#{chart} .scatterlayer path.js-line").first.get_attribute("d")
    assert looked.page.locator("#memory-0 .barlayer .point path").count() == 20
    assert looked.page.locator("#seconds-0 .barlayer .point path").count() >= 6
    assert [looked.page.text_content(f"#{chart} .ytitle") for chart in ("memory-0", "seconds-0", "metric")] == [
        "GiB",
        "seconds",
        "entropy (nats per token)",
    ]
    assert looked.page.locator("#memory-0 .xtick").all_text_contents() == list(PHASES)


def test_the_step_and_the_figure_can_be_chosen(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", 5))
    for choice, generated in (("2", 0.82), ("middle", 0.83), ("last", 0.85)):
        looked.page.select_option("#step-choice", choice)
        assert looked.traces("seconds-0")["compute"][0] == pytest.approx(generated)
    looked.page.select_option("#metric-choice", "tokens_per_second")
    assert looked.traces("metric") == {"tokens_per_second": [1000.0] * 5}
    looked.page.check("#to-scale")
    widths = looked.page.evaluate("document.getElementById('memory-0').data[0].width")
    assert widths == pytest.approx([0.85, 0.15, 0.35, 1.25, 0.25])


def test_with_a_plan_the_prediction_is_drawn_and_its_words_are_shown(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", planned=True))
    peak = looked.traces("memory-0")["predicted peak"]
    assert [value for value in peak if value is not None] == [12.7] * 6  # the ends of three phases' lines
    assert [value for value in looked.traces("seconds-0")["predicted"] if value is not None] == [0.7] * 6
    assert "budget 12.9 GiB" in looked.page.locator("#memory-0 .annotation").all_text_contents()
    assert looked.page.locator("#plans li").all_inner_texts() == plan()["words"]
    assert "NVIDIA H200" in looked.page.inner_text("#plans")
    looked.page.click(".compared summary")
    assert looked.page.locator(".compared tbody tr").first.inner_text().split() == ["generate", "13", "12.7", "0.85", "0.7", "0", "0"]


def test_without_a_plan_there_is_neither(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run"))
    assert "predicted peak" not in looked.traces("memory-0")
    assert "predicted" not in looked.traces("seconds-0")
    assert not looked.page.is_visible("#plan-section")


def test_a_plan_of_another_version_costs_no_chart(look, tmp_path) -> None:
    run = made_run(tmp_path / "run")
    odd = {"machine": None, "words": "none", "fits": False, "phases": {"train": None, "step": {"peak_gib": "?"}, "dream": {"peak_gib": 1}}}
    (run / "plan.json").write_text(json.dumps(odd))
    looked = look(run)
    assert looked.said == []
    assert "predicted peak" not in looked.traces("memory-0")
    assert "It does not fit." in looked.page.inner_text("#plans")
    assert len(looked.listed()) == 20


def test_a_run_without_a_step_yet(look, tmp_path) -> None:
    run = made_run(tmp_path / "run", 1)
    (run / "metrics.jsonl").write_text("")
    (run / "rollouts.jsonl").unlink()
    (run / "config.yaml").unlink()
    looked = look(run)
    assert looked.said == []
    assert "No samples yet" in looked.page.inner_text("body")


def test_samples_are_filtered_and_ordered(look, tmp_path) -> None:
    run = made_run(tmp_path / "run", 3)
    append(
        run / "rollouts.jsonl", sample_line(3, 9, reward=-2, finish="length", failure="timeout", failure_message="10 s", prompt="odd one")
    )
    looked = look(run)
    page = looked.page
    assert len(looked.listed()) == 13
    page.fill("[name=low]", "0.5")
    assert len(looked.listed()) == 6
    assert all("reward 0.5" in line.replace("\n", " ") or "reward 0.75" in line.replace("\n", " ") for line in looked.listed())
    assert "6 of 13 samples match" in page.inner_text("#found")
    page.fill("[name=high]", "0.6")
    page.fill("[name=first]", "2")
    assert len(looked.listed()) == 2
    page.click("button[type=reset]")
    playwright.expect(page.locator("#samples li")).to_have_count(13)
    page.fill("[name=text]", "ODD")
    assert len(looked.listed()) == 1
    page.fill("[name=text]", "")
    for choice in ("length", "failure"):
        page.select_option("[name=finish]", choice)
        assert len(looked.listed()) == 1
    page.select_option("[name=finish]", "")
    page.select_option("[name=order]", "worst")
    assert "odd one" in looked.listed()[0]
    assert "not scored (timeout): 10 s" in looked.open(0).inner_text()


def test_a_sample_by_keyboard_with_its_tokens_coloured(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", 1))
    page = looked.page
    page.focus("[name=low]")
    page.keyboard.type("0.75")
    assert len(looked.listed()) == 1
    page.focus("#samples summary")
    page.keyboard.press("Enter")
    inside = looked.inside(0)
    assert inside.locator("dt").all_inner_texts() == ["reward", "exact", "advantage", "tokens", "mean log-prob", "ended"]
    assert inside.locator("dd").all_inner_texts() == ["0.75", "0.75", "+1.5", "4", "-0.978", "by itself"]
    assert inside.locator("pre").all_text_contents() == ["What is 3 + 1?", "né 4", "4"]
    tokens = inside.locator(".token")
    assert tokens.all_text_contents() == ["n", "é", " 4", ""]
    assert "log-prob -3.0000, probability 0.050" in str(tokens.nth(1).get_attribute("title"))
    colours = tokens.evaluate_all("all => all.map(one => Number(getComputedStyle(one).backgroundColor.split(',')[3].replace(')', '')))")
    assert colours[0] < colours[3] < colours[2] < colours[1]
    page.uncheck("#colour-tokens")
    assert tokens.first.evaluate("one => getComputedStyle(one).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_nothing_that_a_model_or_a_task_wrote_is_executed(look, tmp_path) -> None:
    run = made_run(tmp_path / "<img src=x onerror='window.hacked=1'>", 2, planned=True)
    other = made_run(tmp_path / "<b>two", 2)
    lines = [metrics_line(step) | {f"reward/{HOSTILE}": 0.5, f"device_gib/train/{NAME}": 1.0, f"seconds/{NAME}": 1.0} for step in (3, 4)]
    append(run / "metrics.jsonl", *lines)
    texts = dict.fromkeys(("prompt", "answer", "completion", "failure", "failure_message"), HOSTILE)
    append(run / "rollouts.jsonl", sample_line(4, 0, **texts, parts={HOSTILE: 1.0}, token_chars=None))
    append(run / "rollouts.jsonl", sample_line(4, 1, **texts, token_chars=[5, 5, 5, len(HOSTILE) - 15]))
    (run / "plan.json").write_text((run / "plan.json").read_text().replace("NVIDIA H200", "<img src=x onerror='window.hacked=1'>"))
    looked = look(run, other)
    page = looked.page
    for number in range(2):
        assert looked.open(number).locator("pre").all_text_contents() == [HOSTILE] * 3
    page.select_option("#metric-choice", f"reward/{HOSTILE}")
    page.locator("#reward").hover()
    page.locator("#memory-0").hover()
    page.click(".compared summary")
    assert "<b>two" in page.locator("#loss .legendtext").all_text_contents()  # Plotly draws tags as such, unless it is kept from it
    assert "<b>bold</b> &lt;" in page.text_content("#metric .ytitle")
    assert NAME in page.locator("#memory-0 .legendtext").all_text_contents()
    assert NAME in page.locator("#memory-0 .xtick").all_text_contents()
    assert page.locator("img, iframe, object, #samples b:not(.figure b), a, h1 b, h3 b, #plans b").count() == 0
    assert page.locator("script").count() == 3
    assert page.evaluate("window.hacked") is None
    assert looked.said == []  # the policy had nothing to refuse either
    assert len(looked.asked) == 1 + sum(address.startswith("data:") for address in looked.asked)
    assert "<img src=x" in page.inner_text("#runs")


def test_the_policy_refuses_what_would_slip_through(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "run", 1))
    looked.page.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.hacked = 1'>`)")
    looked.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s); }"
    )
    assert looked.page.evaluate("fetch('https://example.com').then(() => 'asked', () => 'refused')") == "refused"
    assert looked.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in looked.said)


def test_two_runs_side_by_side(look, tmp_path) -> None:
    looked = look(made_run(tmp_path / "first", 3, planned=True), made_run(tmp_path / "second", 5))
    page = looked.page
    assert page.locator("#runs h3").all_inner_texts() == ["first", "second"]
    assert {name: len(y) for name, y in looked.traces("loss").items()} == {"first": 3, "second": 5}
    memory = [page.locator(f"#memory-{number}").bounding_box() for number in range(2)]
    assert memory[0]["y"] == memory[1]["y"]
    assert memory[0]["x"] < memory[1]["x"]
    assert "predicted peak" in looked.traces("memory-0")
    assert "predicted peak" not in looked.traces("memory-1")
    page.select_option("#step-choice", "2")
    assert "second, step 2" in page.inner_text("#seconds-1-caption")
    assert len(looked.listed()) == 32
    page.select_option("[name=run]", "0")
    assert len(looked.listed()) == 12


def test_what_is_left_out_of_a_large_run_is_said(look, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.report.page.run.ROLLOUT_BYTES", 20_000)
    monkeypatch.setattr("ebbtide.report.page.run.SPREAD", 10)
    looked = look(made_run(tmp_path / "run", 100))
    assert len(looked.listed()) == 50
    looked.page.click("#more")
    held = len(looked.listed())
    assert 50 < held < 100
    assert f"holds {held} of about 400 samples" in looked.page.inner_text("#left-out")
    assert "step 100" in looked.listed()[0].replace("\n", " ")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_fits_the_screen_in_light_and_dark(look, tmp_path, width, scheme) -> None:
    run = made_run(tmp_path / "run", planned=True)
    append(run / "rollouts.jsonl", sample_line(5, 7, prompt="x" * 5000, completion="y" * 5000, token_chars=None))
    looked = look(run, made_run(tmp_path / ("long-name-" * 12), 2), viewport={"width": width, "height": 800}, color_scheme=scheme)
    looked.page.fill("[name=text]", "xxx")
    looked.open(0)
    assert looked.page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = looked.page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (bright[0] > bright[1]) == (scheme == "dark")
    assert looked.said == []


def test_a_served_page_goes_on_with_its_run(chromium, tmp_path) -> None:
    run = made_run(tmp_path / "run", 3)
    with serving(run) as port:
        looked = Looked(chromium, f"http://127.0.0.1:{port}/")
        page = looked.page
        expect = playwright.expect
        expect(page.locator("#state")).to_contain_text("live, read at")
        page.fill("[name=low]", "0.75")
        assert len(looked.listed()) == 3
        append(run / "metrics.jsonl", metrics_line(4))
        append(run / "rollouts.jsonl", *(sample_line(4, number) for number in range(4)))
        expect(page.locator("#samples li")).to_have_count(4, timeout=20_000)  # the filter holds
        assert looked.traces("reward")["reward"][-1] == metrics_line(4)["reward"]
        assert "step 4" in page.inner_text("#seconds-0-caption")
        looked.open(0)
        append(run / "rollouts.jsonl", sample_line(5, 3))
        expect(page.locator("#found")).to_contain_text("There are new samples", timeout=20_000)
        assert page.locator("#samples details[open]").count() == 1  # what somebody reads stays
        assert looked.said == []
        assert {address.removeprefix(f"http://127.0.0.1:{port}") for address in looked.asked} - {"data:,"} == {"/", "/data.json"}
    expect(page.locator("#state")).to_contain_text("not live", timeout=20_000)
    page.close()
