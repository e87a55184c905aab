"""The pages in a real Chromium: drawn, quiet, whole in themselves, and usable without a pointer and without eyes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.report.curve import write_curve_html
from penstock.report.page import write_report
from tests.report.browser import Page
from tests.report.cases import HOSTILE, a_report
from tests.report.pages import at_path

OpenPage = Callable[..., Page]
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [400, 1400])

# Of every visible text: its colour over the nearest background that is not transparent, by WCAG 2's formula.
CONTRASTS = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => channels(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const opaque = (colour) => { const all = channels(colour); return all.length < 4 || all[3] === 1; };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("script, noscript")) continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.textContent.trim().slice(0, 40)]);
  }
  return found;
})()"""

# Pixels of the timeline by the colours that the style sheet names.
PAINTED = """(() => {
  const canvas = document.querySelector("#timeline canvas");
  const style = getComputedStyle(canvas);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const count = (name) => {
    const hex = style.getPropertyValue("--" + name).trim();
    const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    let found = 0;
    for (let k = 0; k < pixels.length; k += 4) {
      found += pixels[k] === r && pixels[k + 1] === g && pixels[k + 2] === b && pixels[k + 3] === 255;
    }
    return found;
  };
  return {copy: count("copy"), step: count("step"), stall: count("stall")};
})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, a_report())
    return path


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curve") / "curve.html"
    write_curve_html(path, a_report().curve, title="A curve")
    return path


def check_quiet(page: Page, path: Path) -> None:
    assert page.complaints() == []
    assert page.requests() == [path.as_uri()]


@SCHEMES
@WIDTHS
def test_it_is_drawn_quietly_and_fits(report: Path, open_page: OpenPage, width: int, dark: bool) -> None:
    page = open_page(report, width=width, dark=dark)
    painted = page.run(PAINTED)
    assert painted["copy"] > 1000 and painted["step"] > 1000 and painted["stall"] > 50
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 27)" if dark else "rgb(252, 252, 251)"
    )
    check_quiet(page, report)


@SCHEMES
@WIDTHS
def test_a_curve_alone_is_drawn_quietly_and_fits(curve: Path, open_page: OpenPage, width: int, dark: bool) -> None:
    page = open_page(curve, width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelectorAll('figure circle.mark').length") == 2 * len(a_report().curve)
    assert min(ratio for ratio, _ in page.run(CONTRASTS)) >= 4.5
    check_quiet(page, curve)


@SCHEMES
def test_every_text_can_be_read_and_every_shape_seen(report: Path, open_page: OpenPage, dark: bool) -> None:
    page = open_page(report, dark=dark)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = page.run(CONTRASTS)
    assert len(found) > 100
    assert [text for ratio, text in found if ratio < 4.5] == []
    # What is drawn without letters: 3 to 1 (WCAG 1.4.11). A probe in each colour goes through the same formula.
    page.run(
        "for (const name of ['copy', 'step', 'stall', 'focus', 'wrong']) {"
        "const probe = document.createElement('p'); probe.textContent = 'probe ' + name;"
        "probe.style.color = `var(--${name})`; document.querySelector('.tiles').append(probe); }"
    )
    shapes = {text: ratio for ratio, text in page.run(CONTRASTS) if text.startswith("probe")}
    assert len(shapes) == 5 and min(shapes.values()) >= 3


def test_its_numbers_are_the_jsons(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    document = page.run("JSON.parse(document.getElementById('report-data').textContent)")
    shown = page.run("[...document.querySelectorAll('data')].map((each) => [each.dataset.path, each.value])")
    assert len(shown) > 100
    for path, value in shown:
        assert json.loads(value) == at_path(document, path), path
    # What the bars' lengths say: bytes, of the largest weight's.
    bars = page.run(
        "[...document.querySelectorAll('#residency ~ .scroll .bar')].map((bar) => ['resident', 'rest'].map((kind) =>"
        "{ const part = bar.querySelector('.' + kind);"
        "  return part ? part.getBoundingClientRect().width / bar.clientWidth : 0; }))"
    )
    largest = max(weight["nbytes"] for weight in document["weights"])
    for weight, (prefix, rest) in zip(document["weights"], bars, strict=True):
        parts = weight["resident_bytes"], weight["nbytes"] - weight["resident_bytes"]
        # Within a pixel: no part that is there is narrower than one.
        assert (prefix, rest) == pytest.approx(tuple(count / largest for count in parts), abs=0.01)


def test_the_charts_points_are_the_jsons(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    document = page.run("JSON.parse(document.getElementById('report-data').textContent)")
    marks = page.run(
        "[...document.querySelectorAll('#chart-time .mark')]"
        ".map((each) => ({...each.dataset, kind: each.classList[1]}))"
    )
    for kind, rows, name in (("predicted", "curve", "predicted_s"), ("measured", "measured", "run_s")):
        drawn = [mark for mark in marks if mark["kind"] == kind]
        assert [int(mark["budget"]) for mark in drawn] == [row["budget_bytes"] for row in document[rows]]
        assert [float(mark["value"]) for mark in drawn] == pytest.approx([row[name] * 1e3 for row in document[rows]])
    # Where they stand is one straight scale each way.
    for axis, of in (("x", "budget"), ("y", "value")):
        (low, high) = sorted((float(mark[of]), float(mark[axis])) for mark in marks)[:: len(marks) - 1]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        for mark in marks:
            assert float(mark[axis]) == pytest.approx(low[1] + slope * (float(mark[of]) - low[0]), abs=0.02)


def said(event: dict[str, Any], stalls: list[dict[str, Any]]) -> str:
    """What a lane says of a span, written once more."""

    def took(ns: int) -> str:
        return f"{ns} ns" if ns < 1e3 else f"{ns / 1e3:.3f} \N{MICRO SIGN}s" if ns < 1e6 else f"{ns / 1e6:.6f} ms"

    arguments = event["args"]
    begin_ns, ns = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
    where = f"begins at {took(begin_ns)}, run {arguments['run']} of {arguments['method']}"
    name = f"{arguments['index']}, {event['name']}"
    if event["cat"] == "copy":
        amount = f"{arguments['bytes']:,} bytes in {took(ns)}, {arguments['GB_per_s']} GB/s"
        return f"Copy {name}: {amount}; {where}"
    waited = [stall for stall in stalls if (stall["run"], stall["step"]) == (arguments["run"], arguments["index"])]
    tail = [f"; stalled before it for {took(each['stall_ns'])} at most, for {each['weight']}" for each in waited]
    return f"Step {name}: {took(ns)}; {where}{''.join(tail)}"


FOCUS = (
    "({text: document.activeElement.getAttribute('aria-valuetext'), lane: document.activeElement.dataset.lane,"
    " chart: document.activeElement.closest('figure')?.id, tag: document.activeElement.tagName,"
    " outline: getComputedStyle(document.activeElement).outlineStyle + ' '"
    " + getComputedStyle(document.activeElement).outlineWidth,"
    " name: document.activeElement.textContent.trim().slice(0, 20),"
    " readout: document.getElementById('timeline-readout').textContent})"
)


def test_everything_is_reached_by_the_keyboard_and_the_focus_is_seen(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    reached: list[dict[str, Any]] = []
    page.press("Tab")
    while (focus := page.run(FOCUS))["tag"] != "BODY":
        reached.append(focus)
        assert focus["outline"] == "solid 2px", focus
        page.press("Tab")
        assert len(reached) < 60
    assert [each["name"] for each in reached if each["tag"] == "A"][:2] == ["At a glance", "Timeline"]
    assert [each["name"] for each in reached if each["tag"] == "BUTTON"] == [
        "Show everything",
        "Zoom in",
        "Zoom out",
        "Previous run",
        "Next run",
        "Save the trace",
    ]
    assert [each["lane"] for each in reached if "lane" in each] == ["copy", "compute"]
    assert [each["chart"] for each in reached if "chart" in each] == ["chart-time", "chart-throughput"]
    assert len([each for each in reached if each["tag"] == "SUMMARY"]) == 2
    check_quiet(page, report)


@pytest.mark.parametrize("lane", ["copy", "compute"])
def test_the_arrow_keys_say_every_span_exactly(report: Path, open_page: OpenPage, lane: str) -> None:
    page = open_page(report)
    data = a_report()
    events = [event for event in json.loads(data.trace_json)["traceEvents"] if event.get("cat") == lane]
    stalls = page.run("JSON.parse(document.getElementById('report-data').textContent).stalls")
    page.run(f"document.querySelector('[data-lane={lane}]').focus()")
    page.press("Home")
    for event in sorted(events, key=lambda event: float(event["ts"])):
        focus = page.run(FOCUS)
        assert focus["text"] == focus["readout"] == said(event, stalls)
        page.press("ArrowRight")
    # Beyond the last there is none; a page back is a run back.
    assert page.run(FOCUS)["text"] == said(events[-1], stalls)
    page.press("Home")
    page.press("PageDown")
    assert f"run 2 of {data.summary.method}" in page.run(FOCUS)["text"]


def test_the_keys_zoom_and_what_is_focused_stays_in_view(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)

    def view() -> tuple[float, float]:
        found = page.run("[timeline.dataset.from, timeline.dataset.to].map(Number)")
        return found[0], found[1]

    runs = a_report().runs
    begin, end = view()
    assert runs[-2].end_ns < begin < runs[-1].begin_ns and runs[-1].end_ns < end
    page.run("document.querySelector('[data-lane=compute]').focus()")
    page.press("0")
    whole = view()
    assert whole[0] < runs[0].begin_ns and runs[-1].end_ns < whole[1]
    page.press("+")
    page.press("+")
    near = view()
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4)
    page.press("Home")
    assert view()[0] <= runs[0].begin_ns and view()[1] - view()[0] == pytest.approx(near[1] - near[0])
    page.press("-")
    assert view()[1] - view()[0] == pytest.approx((near[1] - near[0]) * 2)


def test_pointing_says_the_same_as_the_keys(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    stalls = page.run("JSON.parse(document.getElementById('report-data').textContent).stalls")
    events = [event for event in json.loads(a_report().trace_json)["traceEvents"] if event.get("cat") == "compute"]
    last = events[-1]
    box = page.run(
        "(() => { const lane = document.querySelector('[data-lane=compute]'); lane.scrollIntoView({block: 'center'});"
        "const box = lane.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    begin, end = page.run("[timeline.dataset.from, timeline.dataset.to].map(Number)")
    middle_ns = (last["ts"] + last["dur"] / 2) * 1e3
    page.move_mouse(box[0] + box[2] * (middle_ns - begin) / (end - begin), box[1] + box[3] / 2)
    assert page.run(FOCUS)["readout"] == said(last, stalls)


def test_a_chart_says_its_points(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    page.run("document.querySelector('#chart-time .plot').focus()")
    page.press("Home")
    first = page.run(
        "[document.activeElement.ariaValueText, document.getElementById('chart-time-readout').textContent]"
    )
    # Predicted and measured at the floor: two points of one budget.
    assert first == ["Predicted in 9,437,184 bytes: 12.500 ms a run, bound 11.000 ms, 23,068,672 bytes streamed"] * 2
    page.press("ArrowRight")
    assert page.run("document.activeElement.ariaValueText").startswith("Measured in 9,437,184 bytes: 13.100 ms a run")
    page.press("End")
    assert page.run("document.activeElement.ariaValueNow") == str(len(a_report().curve) + len(a_report().measured))


def test_the_saved_trace_is_the_trace(report: Path, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(report)
    page.allow_downloads(tmp_path)
    page.run("document.getElementById('save-trace').focus()")
    page.press("Enter")
    saved = tmp_path / "trace.json"
    page.await_download()
    assert json.loads(saved.read_text()) == json.loads(a_report().trace_json)


def test_a_hostile_name_runs_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    write_report(path, a_report(hostile=True))
    page = open_page(path)
    assert page.run("[window.broken, document.images.length, document.title]") == [None, 0, f"A report{HOSTILE}"]
    page.run("document.querySelector('[data-lane=copy]').focus()")
    page.press("End")
    assert f"head.weight{HOSTILE}" in page.run(FOCUS)["readout"]
    check_quiet(page, path)


def test_what_a_screen_reader_is_given_has_names(report: Path, open_page: OpenPage) -> None:
    page = open_page(report)
    nodes = [node for node in page.accessibility() if not node.get("ignored")]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        by_role.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("link", "button", "slider", "table", "region", "heading", "navigation", "image"):
        assert all(by_role.get(role, [])), (role, by_role.get(role))
    assert sorted(by_role["slider"]) == [
        "Copies of the trace",
        "Steps of the trace",
        "Throughput, runs per second, against the budget. The table below has the numbers.",
        "Time of a run, ms, against the budget. The table below has the numbers.",
    ]
    assert len(by_role["main"]) == len(by_role["banner"]) == len(by_role["contentinfo"]) == 1
    # The two tables that are folded away have no place in it.
    assert len(by_role["table"]) == 4
