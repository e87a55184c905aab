"""The file that is written: whole in itself, its numbers those of its JSON, and no name in it is markup."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.report.curve import CurvePoint, write_curve_html
from penstock.report.data import ReportData, to_document
from penstock.report.markup import Figures, bytes_text, part_text, seconds_text
from penstock.report.page import write_report
from tests.report.cases import HOSTILE, MIB, a_report, a_trace
from tests.report.pages import Parsed, at_path


def parsed(tmp_path: Path, data: ReportData) -> Parsed:
    write_report(tmp_path / "report.html", data)
    return Parsed((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_the_embedded_data_is_the_report(tmp_path: Path) -> None:
    page = parsed(tmp_path, a_report(hostile=True))
    stored = [element.text for element in page.all("script") if element.attributes.get("type") == "application/json"]
    assert len(stored) == 2 and not any("<" in content for content in stored)
    assert page.embedded("report-data") == json.loads(json.dumps(to_document(a_report(hostile=True))))
    assert page.embedded("trace-data") == a_trace(f"head.weight{HOSTILE}", f"mm{HOSTILE}", f"decode{HOSTILE}")


def test_every_number_on_the_page_is_the_jsons(tmp_path: Path) -> None:
    page = parsed(tmp_path, a_report())
    document = page.embedded("report-data")
    shown = page.all("data")
    for element in shown:
        assert json.loads(element.attributes["value"]) == at_path(document, element.attributes["data-path"])
    first = {element.attributes["data-path"]: element.text for element in reversed(shown)}
    last = {element.attributes["data-path"]: element.text for element in shown}
    assert first["summary.budget_bytes"] == "20.0 MiB" and last["summary.budget_bytes"] == "20,971,523 bytes"
    assert first["summary.run_s"] == "10.2 ms" and first["summary.bytes_per_s"] == "1.02 GB/s"
    assert first["summary.link_part"] == "24%" and first["summary.stall_ns"] == "499 \N{MICRO SIGN}s"
    assert first["summary.identical"] == "yes"
    # Nothing of the data is left out: every list has all its rows, and the summary every number that is one.
    for rows, count in (("measured", 3), ("curve", 12), ("weights", 3), ("runs", 3), ("stalls", 3)):
        assert {path.split(".")[1] for path in first if path.startswith(rows)} == {str(k) for k in range(count)}
    numbers = {f"summary.{name}" for name, value in document["summary"].items() if not isinstance(value, str)}
    assert numbers - first.keys() == {"summary.state_bytes"}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1000), "0.98 KiB"),
        (bytes_text(1023 * 1024), "1.00 MiB"),
        (bytes_text(37_765_120), "36.0 MiB"),
        (bytes_text(5 * 2**40), "5.00 TiB"),
        (seconds_text(0.0), "0 s"),
        (seconds_text(9.996e-7), "1.00 \N{MICRO SIGN}s"),
        (seconds_text(0.0591758), "59.2 ms"),
        (seconds_text(75.25), "75.2 s"),
        (part_text(0.0), "0%"),
        (part_text(0.084), "8.4%"),
        (part_text(0.68), "68%"),
    ],
)
def test_numbers_are_said_in_three_digits(number: str, said: str) -> None:
    assert number == said


def test_a_number_that_is_not_in_the_document_cannot_be_shown() -> None:
    with pytest.raises(KeyError):
        Figures(to_document(a_report()))("summary.budget", bytes_text)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    plain, hostile = parsed(tmp_path, a_report()), parsed(tmp_path, a_report(hostile=True))
    # The same elements in the same order, and the names as they are.
    assert [element.tag for element in hostile.elements] == [element.tag for element in plain.elements]
    assert [sorted(element.attributes) for element in hostile.elements] == [
        sorted(element.attributes) for element in plain.elements
    ]
    assert hostile.all("h1")[0].text == hostile.all("title")[0].text == f"A report{HOSTILE}"
    assert f"head.weight{HOSTILE}" in [element.text for element in hostile.all("th")]


def test_a_hostile_title_of_a_curve_stays_text(tmp_path: Path) -> None:
    write_curve_html(tmp_path / "curve.html", [CurvePoint(MIB, 0.1, 0.05, 7)], title=HOSTILE)
    page = Parsed((tmp_path / "curve.html").read_text(encoding="utf-8"))
    assert page.all("h1")[0].text == page.embedded("curve-data")["title"] == HOSTILE
    assert not page.all("img")


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    page = parsed(tmp_path, a_report())
    for element in page.elements:
        assert element.tag not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert "src" not in element.attributes
        assert not [name for name in element.attributes if name.startswith("on")]
    links = [element.attributes["href"] for element in page.all("a")]
    assert [link for link in links if not link.startswith("#")] == ["https://ui.perfetto.dev"]
    (style,) = page.all("style")
    assert "url(" not in style.text and "@import" not in style.text
    (policy,) = [e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes]
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_the_structure_can_be_followed_without_eyes(tmp_path: Path) -> None:
    page = parsed(tmp_path, a_report())
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) == 1
    levels = [int(element.tag[1]) for element in page.elements if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    identifiers = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(identifiers) == len(set(identifiers))
    for section in page.all("section"):
        assert section.attributes["aria-labelledby"] in identifiers
    for link in page.all("a"):
        assert link.attributes["href"].removeprefix("#") in [*identifiers, "https://ui.perfetto.dev"]
    for table in page.all("table"):
        assert table.children[0].tag == "caption" and table.children[0].text
        headings = [element for element in page.all("th") if _inside(element, table)]
        assert headings and all(element.attributes["scope"] in ("col", "row") for element in headings)
    for drawing in page.all("svg"):
        assert drawing.attributes.get("aria-label") or drawing.attributes.get("aria-hidden") == "true"


def _inside(element: object, outer: object) -> bool:
    parent = getattr(element, "parent", None)
    return parent is outer or (parent is not None and _inside(parent, outer))


def test_what_went_wrong_is_said_in_words(tmp_path: Path) -> None:
    good = parsed(tmp_path, a_report())
    summary = dataclasses.replace(a_report().summary, identical=False, peak_bytes=40 * MIB)
    bad = parsed(tmp_path, a_report(summary=summary))

    def wrong(page: Parsed) -> list[str]:
        return [element.text for element in page.all("div") if element.attributes.get("class") == "wrong"]

    assert wrong(good) == []
    peak, identical = wrong(bad)
    assert "ABOVE THE BUDGET" in peak and "NO" in identical


def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    """Under placement="lru", in a graph, without copies: no plan, no stall, no link, no curve, nothing compared."""
    unknown = dataclasses.replace(
        a_report().summary,
        resident_bytes=None,
        ring_bytes=None,
        stall_ns=None,
        link_bytes_per_s=None,
        link_part=None,
        identical=None,
    )
    page = parsed(tmp_path, a_report(summary=unknown, curve=(), stalls=()))
    words = page.all("main")[0].text
    for sentence in ("nothing is copied", "not timed inside a graph", "not compared", "There is no prediction"):
        assert sentence in words
    assert "No step of the trace waited for a copy" in words
    assert not page.all("figure")


def test_numbers_that_json_has_no_word_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_report(tmp_path / "no.html", a_report(curve=(CurvePoint(MIB, float("nan"), 0.1, 0),)))
    assert not (tmp_path / "no.html").exists()


def test_a_curve_without_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one point"):
        write_curve_html(tmp_path / "curve.html", [])


def test_a_curve_is_drawn_in_the_order_of_budgets(tmp_path: Path) -> None:
    points = [CurvePoint(3 * MIB, 0.1, 0.05, 7), CurvePoint(MIB, 0.4, 0.2, 70)]
    write_curve_html(tmp_path / "curve.html", points, title="Two")
    page = Parsed((tmp_path / "curve.html").read_text(encoding="utf-8"))
    document = page.embedded("curve-data")
    assert document == {"title": "Two", "curve": [dataclasses.asdict(point) for point in reversed(points)]}
    for element in page.all("data"):
        assert json.loads(element.attributes["value"]) == at_path(document, element.attributes["data-path"])
    times, throughputs = ([e for e in page.all("circle") if _inside(e, figure)] for figure in page.all("figure"))
    assert [float(dot.attributes["data-value"]) for dot in times] == [400.0, 100.0]
    assert [float(dot.attributes["data-value"]) for dot in throughputs] == [2.5, 10.0]
    # Four times the time stands four times as high over the axis.
    base = 210 - 34
    heights = [base - float(dot.attributes["cy"]) for dot in times]
    assert heights[0] == pytest.approx(4 * heights[1], abs=0.05)


def test_rendering_needs_no_torch() -> None:
    program = "import sys, penstock.report.page, penstock.report.curve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
