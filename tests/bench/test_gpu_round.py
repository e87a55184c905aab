"""The round of everything that needs a GPU: its commands are ones that there are, and it says how each ended."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
from bench.gpu_round import STEPS, Step

from bench import gpu_round

TESTS = [step for step in STEPS if step.arguments[0] == "pytest"]
BENCHMARKS = [step for step in STEPS if step.arguments[0] != "pytest"]


class Parsed(Exception):
    pass


@pytest.mark.parametrize("step", BENCHMARKS, ids=lambda step: step.name)
def test_benchmarks_take_these_arguments(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)  # type: ignore[call-overload]
        raise Parsed

    _, name, *arguments = gpu_round.placed(step, tmp_path)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = importlib.import_module(f"{name}.__main__" if name == "bench.suite" else name)
    with pytest.raises(Parsed):
        module.main()


def test_every_test_of_a_gpu_is_in_a_step() -> None:
    named = [each for step in TESTS for each in step.arguments if each.startswith("tests/")]
    root = Path(__file__).parents[2]
    assert sorted(named) == sorted(str(path.relative_to(root)) for path in (root / "tests/gpu").glob("test_*.py"))


def test_how_each_step_ended_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What it has started holds the output open as long as it lives.
    (tmp_path / "waits.py").write_text(
        "import signal, subprocess, sys\n"
        "print('begun', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    )

    def step(name: str, limit_s: float, *arguments: str) -> Step:
        return Step(name, limit_s, ("timeit", "-n1", "-r1", *arguments))

    steps = [
        step("passes", 60, "-s", "pass", "import pathlib; pathlib.Path('FOLDER/figures.json').write_text('{}')"),
        step("fails", 60, "raise SystemExit('no such GPU')"),
        step("waits", 0.2, f"import runpy; runpy.run_path({str(tmp_path / 'waits.py')!r})"),
        step("long", 1e6, "pass"),
        step("comes last", 60, "pass"),
    ]
    ended = gpu_round.run_all(steps, tmp_path, tmp_path / "work", limit_s=1000)
    assert [one.result for one in ended] == ["passed", "failed", "too long", "not run", "passed"]
    assert "no such GPU" in ended[1].last_line and "it may take 1000000" in ended[3].last_line
    assert (tmp_path / "passes-figures.json").read_text() == "{}"
    assert [one["name"] for one in json.loads((tmp_path / "round.json").read_text())] == [one.name for one in steps]
    assert "comes last                 passed" in capsys.readouterr().out


def test_nothing_runs_without_a_folder_and_steps_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_round.main([])
    assert "name a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_round.main(["--steps", "suite-17"])
    assert "suite-17 unknown" in capsys.readouterr().err
    assert gpu_round.main(["--list", "--steps", "decode-loop"]) == 0
    assert "decode-loop" in capsys.readouterr().out
