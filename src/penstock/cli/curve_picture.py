"""The curve as a picture: PNG through matplotlib, or one HTML file."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.whole_file import refuse_unwritable, whole_file, write_whole
from penstock.errors import PenstockError
from penstock.report.data import CurvePoint

SUFFIXES = (".png", ".html")


class MissingPackageError(PenstockError):
    """An option needs a package that is not installed; the message says which extra brings it."""


def check_curve_path(path: Path) -> None:
    """Checks before planning what would otherwise fail only at the end."""
    refuse_unwritable(path)
    if path.suffix == ".png":
        _pyplot()


def write_curve(path: Path, rows: Sequence[CurvePoint], title: str) -> None:
    if path.suffix == ".png":
        write_whole(path, _png(rows, title))
        return
    from penstock.report.curve import write_curve_html

    with whole_file(path) as partial:
        write_curve_html(partial, rows, title=title)


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")  # there may be no display
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"a PNG needs {error.name}: pip install 'penstock[plot]', or ask for a .html instead"
        ) from error


def _png(rows: Sequence[CurvePoint], title: str) -> bytes:
    figure, (above, below) = _pyplot().subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    unit, unit_bytes = ("GiB", 2**30) if rows[-1].budget_bytes >= 2**30 else ("MiB", 2**20)
    budgets = [row.budget_bytes / unit_bytes for row in rows]
    above.plot(budgets, [row.predicted_s * 1e3 for row in rows], marker="o", label="predicted")
    above.plot(budgets, [row.bound_s * 1e3 for row in rows], linestyle="--", label="bound")
    above.set_ylabel("ms per run")
    above.set_ylim(bottom=0)
    above.legend()
    above.set_title(title, parse_math=False)  # a name may hold a $
    timed = [(budget, row.runs_per_s) for budget, row in zip(budgets, rows, strict=True) if row.runs_per_s is not None]
    below.plot([budget for budget, _ in timed], [rate for _, rate in timed], marker="o")
    below.set_ylabel("runs per second")
    below.set_ylim(bottom=0)
    below.set_xlabel(f"budget, {unit}")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    _pyplot().close(figure)
    return picture.getvalue()
