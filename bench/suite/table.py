"""The result as markdown: a table per number of tokens, what is missing and why, and the comparison with each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.suite.result import FAILED, MISSING, RAN, Comparison, Row, Yardsticks, derive

_COLUMNS = (
    "system",
    "budget",
    "back to back (spread)",
    "synchronised (spread)",
    "host",
    "streamed",
    "rate",
    "bound",
    "of bound",
    "device peak",
    "host peak",
    "output",
)


def markdown(
    rows: Sequence[Row], comparisons: Sequence[Comparison], yardsticks: Yardsticks, titles: Mapping[str, str]
) -> str:
    parts = []
    for tokens in sorted({row.tokens for row in rows}):
        mine = [row for row in rows if row.tokens == tokens]
        shown = [row for row in mine if row.status == RAN and not row.for_comparison]
        parts.append(f"## Tokens per forward: {tokens}\n")
        parts.append(_table(_COLUMNS, [_cells(row, yardsticks, titles) for row in shown]))
        gone = _gone(mine, yardsticks, titles)
        if gone:
            parts.append(_table(("system", "budget", "status", "reason"), gone))
        against = [comparison for comparison in comparisons if comparison.tokens == tokens]
        if against:
            parts.append("Within each peer's peak of device memory all in all, or at our floor where that is more:\n")
            columns = (
                "peer",
                "its peak",
                "its time",
                "ours",
                "our budget",
                "our peak",
                "our time",
                "we are",
                "we are, synchronised",
            )
            parts.append(_table(columns, [_against(comparison, titles) for comparison in against]))
    return "\n".join(parts)


def _gone(rows: Sequence[Row], yardsticks: Yardsticks, titles: Mapping[str, str]) -> list[list[str]]:
    """One line for all budgets at which a system is missing, or failed, for one reason."""
    budgets: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status in (MISSING, FAILED):
            key = (titles[row.system], row.status, _one_line(row.reason))
            budgets.setdefault(key, []).append(_budget(row, yardsticks))
    return [
        [title, ", ".join(dict.fromkeys(mine)), status, reason] for (title, status, reason), mine in budgets.items()
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cells(row: Row, yardsticks: Yardsticks, titles: Mapping[str, str]) -> list[str]:
    derived = derive(row, yardsticks)
    assert row.back_to_back and row.synchronised and row.traffic and row.memory
    streamed = row.traffic.bytes_streamed
    return [
        titles[row.system],
        _budget(row, yardsticks),
        f"{_ms(row.back_to_back.median_s)} ({row.back_to_back.spread:.0%})",
        f"{_ms(row.synchronised.median_s)} ({row.synchronised.spread:.0%})",
        _host(row),
        "unknown" if streamed is None else f"{_gb(streamed)} {row.traffic.source}",
        "unknown" if derived.bytes_per_s is None else f"{derived.bytes_per_s / 1e9:.1f} GB/s",
        "unknown" if derived.bound_s is None else _ms(derived.bound_s),
        "unknown" if derived.percent_of_bound is None else f"{derived.percent_of_bound:.0f}%",
        "unknown" if row.memory.peak_bytes is None else f"{_gb(row.memory.peak_bytes)} {row.memory.peak_source}",
        "unknown" if row.host_peak_bytes is None else _gb(row.host_peak_bytes),
        _output(row),
    ]


def _host(row: Row) -> str:
    if row.host_alone is None or row.host_behind is None:
        return "not measured"
    return f"{row.host_alone.median_s * 1e6:.0f} / {row.host_behind.median_s * 1e6:.0f} us"


def _output(row: Row) -> str:
    assert row.outputs is not None
    error = f"relative error {max(row.outputs.relative_errors):.1e}"
    if row.outputs.wrong:
        return f"**WRONG**, {error}"
    if row.outputs.equal_to_resident is False:
        return f"**WRONG**, not bit-identical to all resident, {error}"
    if row.outputs.equal_to_resident:
        return f"bit-identical to all resident, {error}"
    return "bit-identical to eager" if row.outputs.equal_to_eager else error


def _against(comparison: Comparison, titles: Mapping[str, str]) -> list[str]:
    return [
        titles[comparison.peer] + (" (**WRONG** output)" if comparison.peer_wrong else ""),
        _gb(comparison.peer_peak_bytes),
        _ms(comparison.peer_s),
        titles[comparison.ours],
        _gb(comparison.budget_bytes),
        "unknown" if comparison.our_peak_bytes is None else _gb(comparison.our_peak_bytes),
        _ms(comparison.our_s),
        _faster(comparison.times_faster),
        _faster(comparison.times_faster_synchronised),
    ]


def _faster(times: float) -> str:
    return f"{times:.2f} times faster" if times >= 1 else f"**{1 / times:.2f} times slower**"


def _budget(row: Row, yardsticks: Yardsticks) -> str:
    if row.budget_bytes is None:
        return "none" if row.budget_fraction is None else f"{row.budget_fraction:.0%}"
    text = f"{row.budget_bytes / yardsticks.weight_bytes:.0%} ({_gb(row.budget_bytes)})"
    return f"{text}, the floor" if row.budget_bytes == row.floor_bytes else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
