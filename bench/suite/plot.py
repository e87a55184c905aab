"""Time and rate against the budget, as SVG files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.suite.result import RAN, Row, Yardsticks, derive
from penstock.plan.calibration import lower_bound_s

Value = Callable[[Row], float | None]


def missing() -> str:
    """Why no plot can be made; empty when one can."""
    return "" if importlib.util.find_spec("matplotlib") else "not importable: matplotlib"


def plot(rows: Sequence[Row], yardsticks: Yardsticks, titles: Mapping[str, str], folder: Path) -> list[Path]:
    def rate(row: Row) -> float | None:
        bytes_per_s = derive(row, yardsticks).bytes_per_s
        return None if bytes_per_s is None else bytes_per_s / 1e9

    files = []
    for tokens in sorted({row.tokens for row in rows}):
        mine = [row for row in rows if row.tokens == tokens and row.status == RAN]
        if not mine:
            continue
        kinds: tuple[tuple[str, str, Value], ...] = (
            ("time", "ms per forward, back to back", lambda row: row.time_s * 1e3),
            ("rate", "GB/s streamed", rate),
        )
        for kind, label, value in kinds:
            path = folder / f"{kind}-t{tokens}.svg"
            _draw(mine, yardsticks, titles, tokens, kind, label, value, path)
            files.append(path)
    return files


def _draw(
    rows: Sequence[Row],
    yardsticks: Yardsticks,
    titles: Mapping[str, str],
    tokens: int,
    kind: str,
    label: str,
    value: Value,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5))
    colours = matplotlib.colormaps["tab20"]
    # By its place among all, so that a system looks the same in every plot.
    places_of_all = {name: place for place, name in enumerate(titles)}
    for system in dict.fromkeys(row.system for row in rows):
        points = sorted(
            (place, height)
            for row in rows
            if row.system == system
            for place, height in [(_place(row, yardsticks), value(row))]
            if place is not None and height is not None
        )
        if points:
            wrong = any(row.outputs is not None and row.outputs.wrong for row in rows if row.system == system)
            axes.plot(
                *zip(*points, strict=True),
                marker="x" if wrong else "o",
                color=colours(places_of_all[system] % colours.N),
                linestyle="-" if len(points) > 1 else "none",
                label=titles[system] + (" (WRONG output)" if wrong else ""),
            )
    if kind == "time" and tokens in yardsticks.resident_s:
        places = [step / 100 for step in range(0, 101)]
        bound = [
            1e3
            * lower_bound_s(
                weight_bytes=yardsticks.weight_bytes,
                budget_bytes=int(place * yardsticks.weight_bytes),
                resident_s=yardsticks.resident_s[tokens],
                link_bytes_per_s=yardsticks.link_bytes_per_s,
            )
            for place in places
        ]
        axes.plot([100 * place for place in places], bound, "k--", label="bound")
    if kind == "rate":
        axes.axhline(yardsticks.link_bytes_per_s / 1e9, color="k", linestyle="--", label="link")
    axes.set_xlabel("budget, or peak of a system without one, in % of the weights")
    axes.set_ylabel(label)
    if kind == "time":
        axes.set_yscale("log")  # from a few milliseconds to a second
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(f"{tokens} tokens, {yardsticks.weight_bytes / 1e9:.2f} GB of weights")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _place(row: Row, yardsticks: Yardsticks) -> float | None:
    budget = row.budget_bytes
    if budget is None and row.memory is not None:
        budget = row.memory.peak_bytes
    return None if budget is None else 100 * budget / yardsticks.weight_bytes
