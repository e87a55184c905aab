"""Where every weight lies: a bar and its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.report.data import ReportData, WeightResidency
from penstock.report.markup import Column, Figures, bytes_text, count_text, many, part_text, table, text

_BY = " \N{MULTIPLICATION SIGN} "


def residency(data: ReportData, show: Figures) -> str:
    columns = [
        Column("weight", numeric=False),
        Column("resident and not", numeric=False),
        Column("where", numeric=False),
        *(Column(title) for title in ("size", "resident", "streamed a run")),
        Column("dtype and shape", numeric=False),
    ]
    largest = max((weight.nbytes for weight in data.weights), default=0) or 1
    rows = [
        [
            text(weight.name),
            _bar(weight, largest),
            weight.kind,
            show(f"weights.{k}.nbytes", bytes_text),
            show(f"weights.{k}.resident_bytes", bytes_text),
            show(f"weights.{k}.streamed_bytes", bytes_text),
            text(f"{weight.dtype} {_BY.join(map(str, weight.shape))}"),
        ]
        for k, weight in enumerate(data.weights)
    ]
    return (
        f"<p>{_residency_said(data)}</p>\n"
        '<ul class="legend" aria-label="Key to the bars">'
        '<li><span class="swatch resident" aria-hidden="true"></span>resident</li>'
        '<li><span class="swatch rest" aria-hidden="true"></span>not resident: streamed, or read in place</li></ul>\n'
        + table("Weights in the order of first access", columns, rows, kind="tall")
        + (_experts(data, show) if data.experts else "")
    )


def _experts(data: ReportData, show: Figures) -> str:
    columns = [
        Column("experts", numeric=False),
        *(Column(title) for title in ("in slots", "of", "asked for and there", "not there", "hit rate")),
    ]
    rows = [
        [
            text(each.weights[0]),
            show(f"experts.{k}.slots", count_text),
            show(f"experts.{k}.experts", count_text),
            show(f"experts.{k}.hits", count_text),
            show(f"experts.{k}.misses", count_text),
            show(f"experts.{k}.hit_rate", part_text),
        ]
        for k, each in enumerate(data.experts)
    ]
    said = "Which experts are in slots changes while the program runs. What is not there crosses the link."
    return f"<p>{said}</p>\n" + table("Experts in slots, layer by layer", columns, rows, kind="tall")


def _residency_said(data: ReportData) -> str:
    kinds = [(kind, [each for each in data.weights if each.kind == kind]) for kind in _KINDS]
    parts = [f"{len(found)} {_KINDS[kind]} ({bytes_text(_size(found))})" for kind, found in kinds if found]
    ring = data.summary.ring_bytes
    ring_said = "" if ring is None else f" What streams goes through a ring of {bytes_text(ring)}."
    return text(f"{many(len(data.weights), 'weight')}: {', '.join(parts)}.{ring_said}")


_KINDS = {
    "resident": "resident",
    "prefix+suffix": "with a resident prefix and a streamed suffix",
    "streamed": "streamed whole",
    "in place": "read in place in host memory",
    "split": "with a resident prefix and a suffix read in host memory",
    "slots": "with slots for some of their experts",
    "on demand": "copied on demand, least recently used out first",
}


def _size(weights: Sequence[WeightResidency]) -> int:
    return sum(weight.nbytes for weight in weights)


def _bar(weight: WeightResidency, largest_bytes: int) -> str:
    # Accesses may have separate prefixes, which together may be larger than the weight.
    prefix = min(weight.resident_bytes, weight.nbytes)
    parts = (("resident", prefix), ("rest", weight.nbytes - prefix))
    spans = "".join(
        f'<span class="{kind}" style="width:{100 * count / largest_bytes:.4f}%"></span>'
        for kind, count in parts
        if count
    )
    return f'<span class="bar" aria-hidden="true">{spans}</span>'
