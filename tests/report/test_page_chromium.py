"""The page in a real Chromium: it draws, it filters, it goes on while the run does, and nothing that a model wrote
is ever more than text.

Opening a page takes seconds, so tests share two of them, one of a run and one of two, each as if nobody had touched
it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.report.page.build import write_page
from looked import PAGE_PATIENCE, Looked
from made_run import CHROMIUM, PHASES, append, made_run, metrics_line, plan, sample_line, serving, start_line

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 <b>bold</b> &lt;"
    " %{x}"
)
NAME = "<b>bold<img src=x onerror='window.hacked = 1'> &lt;"  # of a phase or a holding, which has no slash
FORMULA = '=HYPERLINK("https://example.com?"&A1)'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(chromium, tmp_path_factory) -> dict[str, Looked]:
    """The pages that tests share."""
    place = tmp_path_factory.mktemp("shared")
    run = made_run(place / "run", planned=True)
    append(run / "versions.jsonl", start_line(3, torch="2.12.0"))
    odd = {
        "reward": -2,
        "finish": "length",
        "failure": "timeout",
        "failure_message": "10 s",
        "prompt": "odd one",
        "completion": FORMULA,
    }
    append(run / "rollouts.jsonl", sample_line(5, 9, **odd, token_chars=None))
    two = [made_run(place / "first", 3, planned=True), made_run(place / "second", 5, "optimizer.lr=0.01")]
    write_page([run], place / "one.html")
    write_page(two, place / "two.html")
    return {name: Looked(chromium, (place / f"{name}.html").as_uri()) for name in ("one", "two")}


@pytest.fixture
def one(opened) -> Iterator[Looked]:
    opened["one"].at("")
    yield opened["one"]
    assert opened["one"].said == []


@pytest.fixture
def two(opened) -> Iterator[Looked]:
    opened["two"].at("")
    yield opened["two"]
    assert opened["two"].said == []


@pytest.fixture
def look(chromium, tmp_path):
    """look(run, ...): a page of these runs as a file."""
    pages = []

    def open_page(*folders: Path, view: str = "", **context: Any) -> Looked:
        out = tmp_path / "page.html"
        write_page(folders, out)
        pages.append(Looked(chromium, f"{out.as_uri()}#{view}", **context))
        return pages[-1]

    yield open_page
    for looked in pages:
        looked.page.close()


def test_a_run_is_told_without_a_request(one) -> None:
    assert [address for address in one.asked if not address.startswith("data:")] == [one.page.url.partition("#")[0]]
    told = dict(
        zip(one.page.locator("#runs dt").all_inner_texts(), one.page.locator("#runs dd").all_inner_texts(), strict=True)
    )
    assert told == {
        "steps done": "5 of 5",
        "time taken, without loading": "13 s",
        "reward, first → last": "0.1 → 0.41",
        "held-out reward, first → last": "0.05",
        "last step took": "2.65 s",
        "last step waited for memory moves": "0.05 s",
        "tokens a second, last step": "1,000",
        "peak GPU memory, last step": "13 GiB",
    }
    text = one.page.inner_text("#runs")
    for words in (
        "model qwen3 from scratch",
        "Ebbtide 0.1.0 (commit 0123456789ab)",
        "torch 2.11.0, then 2.12.0",
        "transformers 5.17.0",
        "NVIDIA H200",
        "started 2026-11-16 10:00:00 UTC",
    ):
        assert words in text
    for vague in ("of it exposed", "Also", "The figures"):
        assert vague not in one.page.inner_text("body")


def test_metrics_are_chosen_by_group_and_by_name_and_kept_in_the_address(one) -> None:
    page = one.page
    assert one.metrics() == ["reward", "evaluate/reward", "loss", "entropy"]
    assert one.traces(one.chart("reward")) == {"run": [round(1 - 0.9**step, 4) for step in range(1, 6)]}
    assert one.first("loss") == pytest.approx([-0.05 / step for step in range(1, 6)], rel=1e-5)
    assert one.chart("entropy").locator(".ytitle").text_content() == "nats per token"
    assert page.inner_text("figure[data-metric=entropy] .metric") == "entropy of the policy"
    groups = page.locator("#metric-groups details").evaluate_all("all => all.map(one => one.dataset.group)")
    assert groups == ["general", "evaluate", "seconds", "device_gib", "moved_gib", "peak_gib", "seconds_exposed"]
    assert one.view() == {}
    page.focus("#metric-search")
    page.keyboard.type("SECONDS/")
    found = page.locator("#metric-groups label:visible").all_inner_texts()
    assert [name.strip() for name in found] == sorted(f"seconds/{phase}" for phase in (*PHASES, "evaluate"))
    page.locator("#metric-groups label:visible input").nth(1).press("Space")
    assert one.first("seconds/generate") == pytest.approx([0.8 + step / 100 for step in range(1, 6)])
    page.click("#metrics-found")
    assert len(one.metrics()) == 4 + 6
    page.click("#metrics-none")
    assert "No metric is drawn" in page.inner_text("#curves")
    page.click("#metrics-usual")
    page.fill("#metric-search", "")
    page.locator("figure[data-metric=loss] .remove").press("Enter")
    assert one.metrics() == ["reward", "evaluate/reward", "entropy"]
    assert one.view() == {"metric": ["reward", "evaluate/reward", "entropy"]}
    one.at("metric=seconds/train&metric=nothing&metric=reward")
    assert one.metrics() == ["seconds/train", "reward"]


def test_curves_over_time_smoothed_and_a_part_of_them_with_their_csv(one) -> None:
    reward = [round(1 - 0.9**step, 4) for step in range(1, 6)]
    smooth = [reward[0], (0.5 * reward[0] + reward[1]) / 1.5]
    one.at("metric=reward&metric=seconds/train&x=time&smooth=0.5&from=3&to=9&log=reward")
    chart = one.chart("reward")
    assert chart.evaluate("one => [one.layout.yaxis.type, one.layout.xaxis.title.text]") == ["log", "time in s"]
    assert one.first("reward", "x") == [5.43, 8.06]
    assert one.first("reward") == reward[1:3]
    # of the whole run, as the first step counts in it
    assert chart.evaluate("one => one.data[1].y[0]") == pytest.approx(smooth[1])
    heading, *rows = one.csv("#curves-csv")
    assert heading == [
        "run",
        "step",
        "seconds",
        "reward",
        "reward smoothed 0.5",
        "seconds/train",
        "seconds/train smoothed 0.5",
    ]
    assert [row[:4] for row in rows] == [["run", "2", "5.43", "0.19"], ["run", "3", "8.06", "0.271"]]
    one.page.click("#whole-run")
    one.page.select_option("[data-view=x]", "step")
    one.page.locator("[data-view=smooth]").press("Home")
    one.page.locator("figure[data-metric=reward] .log").click()
    one.page.wait_for_function("() => document.querySelector('figure .chart').data.length === 1")
    assert one.view() == {"metric": ["reward", "seconds/train"]}
    box = chart.locator(".nsewdrag").bounding_box()  # what is dragged in one chart holds for all
    one.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 50, steps=4)
    one.page.mouse.up()
    one.page.wait_for_function("() => document.querySelector('[data-view=from]').value !== ''")
    assert one.first("reward", "x") == one.first("seconds/train", "x") == [3, 4]
    assert set(one.view()) == {"metric", "from", "to"}


def test_a_step_phase_by_phase_beside_its_plan(one) -> None:
    page = one.page
    memory, seconds = page.locator("#memory-0"), page.locator("#seconds-0")
    bars = {name: [gib] * 5 for name, gib in {"weights": 3.0, "grads": 1.5, "moments": 6.0, "other": 2.5}.items()}
    assert bars.items() <= one.traces(memory).items()
    assert one.traces(seconds)["compute"] == pytest.approx([0.85, 0.15, 0.35, 1.25, 0.2])
    assert one.traces(seconds)["waiting for memory moves (exposed)"] == pytest.approx([0, 0, 0, 0, 0.05])
    # the ends of three phases' lines
    assert [value for value in one.traces(memory)["predicted peak"] if value is not None] == [12.7] * 6
    assert [value for value in one.traces(seconds)["predicted seconds"] if value is not None] == [0.7] * 6
    assert memory.locator(".barlayer .point path").count() >= 20
    assert memory.locator(".xtick").all_text_contents() == list(PHASES)
    assert "budget 12.9 GiB" in memory.locator(".annotation").all_text_contents()
    assert page.locator("#plans li").all_inner_texts() == plan()["words"]
    assert "NVIDIA H200" in page.inner_text("#plans")
    for choice, generated in (("2", 0.82), ("middle", 0.83), ("last", 0.85)):
        page.select_option("#step-choice", choice)
        assert one.traces(seconds)["compute"][0] == pytest.approx(generated)
    page.check("#to-scale")
    assert memory.evaluate("one => one.data[0].width") == pytest.approx([0.85, 0.15, 0.35, 1.25, 0.25])
    assert one.csv("#phases-csv")[:2] == [
        [
            "run",
            "step",
            "phase",
            "peak GiB",
            "predicted peak GiB",
            "seconds",
            "predicted seconds",
            "seconds waiting for memory moves",
            "GiB moved",
        ],
        ["run", "5", "generate", "13", "12.7", "0.85", "0.7", "0", "0"],
    ]
    page.click(".compared summary")
    assert page.locator(".compared tbody tr").first.inner_text().split() == [
        "generate",
        "13",
        "12.7",
        "0.85",
        "0.7",
        "0",
        "0",
    ]


def test_rollouts_are_grouped_by_prompt(one) -> None:
    page = one.page
    assert "21 of 21 samples match, in 11 groups" in page.inner_text("#found")
    assert one.listed()[0].startswith("step 5 samples 2 of 16 mean reward 0.125 from 0 to 0.25 What is 0 + 5?")
    page.focus("#samples summary")
    page.keyboard.press("Enter")
    inside = one.inside(0)
    assert inside.locator("> pre").all_text_contents() == ["What is 0 + 5?"]  # once
    assert inside.locator(".completion").all_text_contents() == ["né 5", "né 6"]
    assert inside.locator(".sample").first.locator("dt").all_inner_texts() == [
        "reward",
        "part: exact",
        "advantage",
        "tokens",
        "mean log-prob",
        "ended",
    ]
    assert inside.locator(".sample").nth(1).locator("dd").all_inner_texts() == [
        "0.25",
        "0.25",
        "-0.5",
        "4",
        "-0.978",
        "by itself",
    ]
    tokens = inside.locator(".sample").first.locator(".token")
    assert tokens.all_text_contents() == ["n", "é", " 5", ""]
    assert "log-prob -3.0000, probability 0.050" in str(tokens.nth(1).get_attribute("title"))
    colours = tokens.evaluate_all(
        "all => all.map(one => Number(getComputedStyle(one).backgroundColor.split(',')[3].replace(')', '')))"
    )
    assert colours[0] < colours[3] < colours[2] < colours[1]
    page.uncheck("#colour-tokens")
    assert tokens.first.evaluate("one => getComputedStyle(one).backgroundColor") == "rgba(0, 0, 0, 0)"
    page.select_option("[name=group]", "text")
    assert "in 21 groups" in page.inner_text("#found")
    page.select_option("[name=group]", "none")
    assert len(one.listed()) == 21
    assert one.view() == {"group": ["none"], "colours": ["0"]}


def test_rollouts_are_filtered_ordered_and_downloaded_as_text(one) -> None:
    page = one.page
    one.at("group=none&low=0.5&high=0.6&first=2")
    assert len(one.listed()) == 4
    assert all("reward 0.5" in line for line in one.listed())
    page.click("button[type=reset]")
    playwright.expect(page.locator("#samples li")).to_have_count(11, timeout=PAGE_PATIENCE)
    page.fill("[name=text]", "ODD")
    assert len(one.listed()) == 1
    heading, row = one.csv("#rollouts-csv")
    sample = dict(zip(heading, row, strict=True))
    assert sample["completion"] == f"'{FORMULA}"  # no spreadsheet computes it
    assert (sample["reward"], sample["reward/exact"], sample["answer"]) == ("-2", "2.25", "14")
    page.fill("[name=text]", "")
    for choice in ("length", "failure"):
        page.select_option("[name=finish]", choice)
        assert len(one.listed()) == 1
    page.select_option("[name=finish]", "")
    page.select_option("[name=order]", "worst")
    assert "odd one" in one.listed()[0]
    assert "not scored (timeout): 10 s" in one.open(0).inner_text()


def test_two_runs_are_overlaid_and_compared(two) -> None:
    page = two.page
    assert [name.strip() for name in page.locator("#runs tbody td:first-child").all_inner_texts()] == [
        "first",
        "second",
    ]
    assert {name: len(y) for name, y in two.traces(two.chart("loss")).items()} == {"first": 3, "second": 5}
    colours = two.chart("loss").evaluate("one => one.data.map(trace => trace.line.color)")
    assert len(set(colours)) == 2
    assert page.inner_text("figure[data-metric=loss] .latest").split() == ["-0.0167", "-0.01"]
    page.uncheck("#drawn-runs input[value=first]")
    assert list(two.traces(two.chart("loss"))) == ["second"]
    assert two.chart("loss").evaluate("one => one.data[0].line.color") == colours[1]  # it keeps its own
    assert two.view() == {"hide": ["first"]}
    rows = [row.split("\t") for row in page.locator("#settings tbody tr").all_inner_texts()]
    assert rows == [["config", "optimizer.lr", "0.001", "0.01"], ["config", "train.steps", "3", "5"]]
    assert two.csv("#settings-csv")[1:] == rows
    page.uncheck("[data-view=differing]")
    page.fill("[data-view=setting]", "torch")
    assert page.locator("#settings tbody tr").first.inner_text().split("\t") == ["version", "torch", "2.11.0", "2.11.0"]
    memory = [page.locator(f"#memory-{number}").bounding_box() for number in range(2)]
    assert memory[0]["y"] == memory[1]["y"]
    assert memory[0]["x"] < memory[1]["x"]
    assert "predicted peak" in two.traces(page.locator("#memory-0"))
    assert "predicted peak" not in two.traces(page.locator("#memory-1"))
    page.select_option("#step-choice", "2")
    assert "second, step 2" in page.inner_text("#seconds-1-caption")
    page.select_option("[name=run]", "first")
    assert "12 of 32 samples match" in page.inner_text("#found")


def test_the_policy_refuses_what_would_slip_through(opened) -> None:
    looked = opened["two"]
    looked.page.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.hacked = 1'>`)")
    looked.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); }"
    )
    assert looked.page.evaluate("fetch('https://example.com').then(() => 'asked', () => 'refused')") == "refused"
    assert looked.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in looked.said)
    looked.said.clear()


def test_nothing_that_a_model_or_a_task_wrote_is_executed(look, tmp_path) -> None:
    run = made_run(tmp_path / "<img src=x onerror='window.hacked=1'>", 2, planned=True)
    other = made_run(tmp_path / "<b>two", 2)
    lines = [
        metrics_line(step) | {f"reward/{HOSTILE}": 0.5, f"device_gib/train/{NAME}": 1.0, f"seconds/{NAME}": 1.0}
        for step in (3, 4)
    ]
    append(run / "metrics.jsonl", *lines)
    texts = dict.fromkeys(("prompt", "answer", "completion", "failure", "failure_message"), HOSTILE)
    append(run / "rollouts.jsonl", sample_line(4, 0, **texts, parts={HOSTILE: 1.0}, token_chars=None))
    append(run / "rollouts.jsonl", sample_line(4, 1, **texts, token_chars=[5, 5, 5, len(HOSTILE) - 15]))
    (run / "plan.json").write_text(
        (run / "plan.json").read_text().replace("NVIDIA H200", "<img src=x onerror='window.hacked=1'>")
    )
    (run / "config.yaml").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}, "model": {"path": HOSTILE}}))
    append(run / "versions.jsonl", start_line(1, torch=HOSTILE, commit=HOSTILE, device=HOSTILE))
    looked = look(run, other, view="metric=reward%2F%3C%2Fscript%3E%3Cimg%20src%3Dx%3E&log=%3Cimg%20src%3Dx%3E")
    page = looked.page
    assert looked.open(0).locator("pre").all_text_contents() == [HOSTILE] * 4  # the prompt, its answer, two completions
    page.fill("#metric-search", "bold")
    page.click("#metrics-found")
    titles = page.locator("#curves .metric b").all_text_contents()
    assert f"reward/{HOSTILE}" in titles
    looked.page.wait_for_function(
        "n => document.querySelectorAll('#curves .js-plotly-plot').length === n", arg=len(titles)
    )
    page.locator("#curves .chart").first.hover()
    page.locator("#memory-0").hover()
    page.click(".compared summary")
    # Plotly draws tags as such, unless it is kept from it
    assert NAME in page.locator("#memory-0 .legendtext").all_text_contents()
    assert NAME in page.locator("#memory-0 .xtick").all_text_contents()
    assert f"{HOSTILE}.{HOSTILE}" in page.locator("#settings td").all_text_contents()
    assert any(HOSTILE in row for row in looked.csv("#settings-csv"))
    assert (
        page.locator(
            "img, iframe, object, #samples b:not(.figure b), a, h1 b, #runs b, h3 b, #plans b, #settings b"
        ).count()
        == 0
    )
    assert page.locator("script").count() == 3
    assert page.evaluate("window.hacked") is None
    assert looked.said == []  # the policy had nothing to refuse either
    assert {address.partition(":")[0] for address in looked.asked} <= {"file", "data", "blob"}
    assert "<img src=x" in page.inner_text("#runs")


def test_runs_that_have_little_or_odd_or_too_much(look, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ebbtide.report.page.run.ROLLOUT_BYTES", 60_000)
    monkeypatch.setattr("ebbtide.report.page.run.SPREAD", 30)
    empty, odd, large = made_run(tmp_path / "empty", 1), made_run(tmp_path / "odd"), made_run(tmp_path / "large", 100)
    (empty / "metrics.jsonl").write_text("")
    for name in ("rollouts.jsonl", "config.yaml", "versions.jsonl"):
        (empty / name).unlink()
    shape = {
        "machine": None,
        "words": "none",
        "fits": False,
        "phases": {"train": None, "step": {"peak_gib": "?"}, "dream": {"peak_gib": 1}},
    }
    (odd / "plan.json").write_text(json.dumps(shape))
    looked = look(empty, odd, large, view="group=none&run=large")
    page = looked.page
    assert looked.said == []
    assert "predicted peak" not in looked.traces(page.locator("#memory-1"))
    assert "The plan does not fit the budget." in page.inner_text("#plans")
    assert "not there" in page.inner_text("#settings")
    assert len(looked.listed()) == 50
    assert looked.listed()[0].startswith("step 100")
    page.click("#more")
    assert 50 < len(looked.listed()) < 100
    held = page.evaluate("shown.runs[2].rollouts.length")
    assert f"Of large the page holds {held} of about 400 samples" in page.inner_text("#left-out")


def test_it_fits_the_screen_in_light_and_dark(look, tmp_path) -> None:
    run = made_run(tmp_path / "run", planned=True)
    append(run / "rollouts.jsonl", sample_line(5, 7, prompt="x" * 5000, completion="y" * 5000, token_chars=None))
    named = "a-long-name-" * 10
    other = made_run(tmp_path / named, 2, f"run.name={named}")
    looked = look(run, other, view="text=xxx", viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = looked.page
    looked.open(0)
    assert "1 of 29 samples match" in page.inner_text("#found")  # the link's filter, as it opened
    for width, scheme, colour in ((390, "dark", "#56b4e9"), (1280, "light", "#0072b2")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)  # charts follow
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        bright = [sum(map(int, rgb[4:-1].split(","))) for rgb in (ink, paper)]
        assert (bright[0] > bright[1]) == (scheme == "dark")
        looked.chart("reward").scroll_into_view_if_needed()
        page.wait_for_function(
            "colour => document.querySelector('#curves .chart').data[0].line.color === colour", arg=colour
        )
    assert looked.said == []


@pytest.mark.slow
def test_a_served_page_goes_on_with_its_run(chromium, tmp_path) -> None:
    run = made_run(tmp_path / "run", 3, "train.steps=10")
    with serving(run) as port:
        looked = Looked(chromium, f"http://127.0.0.1:{port}/#group=none")
        page = looked.page
        expect = playwright.expect
        expect(page.locator("#state")).to_contain_text("live, read at", timeout=PAGE_PATIENCE)
        page.fill("[name=low]", "0.75")
        assert len(looked.listed()) == 3
        page.focus("[data-group=general] input")
        append(run / "metrics.jsonl", metrics_line(4))
        append(run / "rollouts.jsonl", *(sample_line(4, number) for number in range(4)))
        expect(page.locator("#samples li")).to_have_count(4, timeout=PAGE_PATIENCE)  # the filter holds
        assert page.evaluate("document.activeElement.type") == "checkbox"  # and so does a reader's place
        assert looked.first("reward")[-1] == metrics_line(4)["reward"]
        assert "step 4" in page.inner_text("#seconds-0-caption")
        assert "time left at this pace" in page.inner_text("#runs")
        looked.open(0)
        append(run / "rollouts.jsonl", sample_line(5, 3))
        expect(page.locator("#found")).to_contain_text("There are new samples", timeout=PAGE_PATIENCE)
        assert page.locator("#samples details[open]").count() == 1  # what somebody reads stays
        assert looked.said == []
        assert {address.removeprefix(f"http://127.0.0.1:{port}") for address in looked.asked} - {"data:,"} == {
            "/",
            "/data.json",
        }
    expect(page.locator("#state")).to_contain_text("not live", timeout=PAGE_PATIENCE)
    page.close()


def test_an_episode_is_told_turn_by_turn(look, tmp_path) -> None:
    """What was sampled, coloured by its log-probs; what the environment answered; tool calls and rewards."""
    run = made_run(tmp_path / "run")
    asked = {
        "completion": "né?",
        "answer": HOSTILE,
        "reward": 0.2,
        "tokens": 2,
        "calls": ["calculator"],
        "failed_calls": 1,
        "token_chars": [2, 1],
        "logprobs": [-0.1, -2.0],
    }
    said = {**asked, "completion": "9", "answer": "", "reward": 0.8, "calls": [], "failed_calls": 0}
    line = sample_line(9, 0, completion="né?9", turns=[asked, said | {"token_chars": None, "logprobs": None}])
    append(run / "rollouts.jsonl", line | {"token_chars": None, "logprobs": None})
    looked = look(run)
    shown = looked.open(0)
    titles = shown.locator("h4").all_text_contents()
    assert "turn 1: 2 tokens, reward 0.2, calls calculator, 1 failed" in titles
    assert "turn 2: 2 tokens, reward 0.8" in titles
    assert titles.count("environment") == 1
    assert HOSTILE in shown.locator("pre").all_text_contents()
    assert shown.locator("pre.completion").all_text_contents() == ["né?", "9"]
    assert shown.locator("pre.completion .token").all_text_contents() == ["né", "?"]
    assert looked.page.evaluate("window.hacked") is None
