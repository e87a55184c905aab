"""Command lines at random, of everything that every command takes: sound, odd and hostile.

Whatever they are, a command ends with a code of the table in docs/cli.md that is not the one of internal errors, shows
no traceback and no control character, gives one JSON document with --json, and leaves no file that was not asked for.
Nothing is compiled, and no program runs: the programs here have no code.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from penstock.cli.children import ChildFailure
from penstock.cli.exit_codes import INTERNAL, MEANINGS
from penstock.cli.main import main
from penstock.weights import write_ptd

_ACTED_UPON = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_HOSTILE = (
    "\x1b[31m",
    "\x1b]0;t\x07",
    "\udcff",
    "\u202e",
    "a\nb",
    "[red]",
    "$",
    "-",
    "--",
    "%s",
    "{}",
    "*",
    "'",
    "\x9b1m",
    "é",
)
_MODELS = """
import sys
print("a line on stdout")
def nothing(): return None
def leaving(): sys.exit(0)
def leaving_with_a_word(): sys.exit("\\x1b[31mword")
def broken(): raise ValueError("\\x1b[31mbroken\\nin two lines")
def ended(): raise EOFError
def deep(): return deep()
def junk(): return (1, 2)
value = 5
"""

# The names of files that are sound, at least to their readers.
_READABLE = ("sound", "baked", "hostile", "tensor", "some")

Value = Callable[[random.Random, Path], str]


def run_one(rng: random.Random) -> None:
    """One command line. AssertionError names it."""
    subjects = _subjects()
    with tempfile.TemporaryDirectory(dir=subjects, prefix="here-") as folder:
        here = Path(folder) / "here"
        here.mkdir()
        line, outputs = command_line(rng, subjects, here)
        before = _listed(subjects)
        code, stdout, stderr = _called(rng, line, here)
        try:
            _check(line, code, stdout, stderr)
            left = {path.name for path in here.rglob("*")} - outputs
            assert not left, f"left behind: {left}"
            assert _listed(subjects) == before, "files beside were changed"
        except (AssertionError, ValueError) as fault:
            said = f"code {code}\nstdout: {stdout[-2000:]!r}\nstderr: {stderr[-2000:]!r}"
            raise AssertionError(f"penstock {line!r}: {fault}\n{said}") from fault


def _check(line: list[str], code: int, stdout: str, stderr: str) -> None:
    assert code in MEANINGS, "a code that docs/cli.md does not have"
    assert code != INTERNAL, "an internal error"
    assert "Traceback (most recent call last)" not in stdout + stderr, "a traceback"
    for text in (stdout, stderr):
        found = _ACTED_UPON.search(text)
        assert found is None, f"{found!r} in the output"
    if _is_flag(line, "--json") and not any(_is_flag(line, flag) for flag in ("-h", "--help", "--version")):
        document = json.loads(stdout, parse_constant=_refuse_constant)
        assert isinstance(document, dict)
        assert ("error" not in document) == (code in (0, 1)) or code == 1, "the code is the document's"
        assert "error" not in document or document["error"]["exit_code"] == code


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _is_flag(line: list[str], flag: str) -> bool:
    return flag in (line[: line.index("--")] if "--" in line else line)


# ---------------------------------------------------------------------------------------------------------- the grammar


def _one_of(*values: str) -> Value:
    """The first ones more often: they are sound, and lead further."""
    return lambda rng, here: values[int(len(values) * rng.random() ** 4)]


def _file(*suffixes: str) -> Value:
    def pick(rng: random.Random, here: Path) -> str:
        subjects = here.parents[1]
        if rng.random() < 0.1:
            return rng.choice(("", ".", "/", "nowhere" + suffixes[0], "x" * 300 + suffixes[0], "/dev/null", "a/b/c"))
        if rng.random() < 0.1:
            return rng.choice(_HOSTILE) + suffixes[0]
        names = sorted(path.name for path in subjects.iterdir() if path.suffix in suffixes)
        readable = [name for name in names if name.startswith(_READABLE)]
        return str(subjects / rng.choice(readable if readable and rng.random() < 0.6 else names))

    return pick


def _output(*suffixes: str) -> Value:
    def pick(rng: random.Random, here: Path) -> str:
        suffix = rng.choice(suffixes)
        odd = ("no/such/folder/o" + suffix, ".", "", str(here), "o.odd", "x" * 300 + suffix, "/proc/o" + suffix)
        if rng.random() < 0.3:
            return rng.choice(odd)
        return rng.choice(("o", "\x1b[31m", "\udcff", "a b", "[red]", "$x$")) + suffix

    return pick


def _mixed(*values: Value) -> Value:
    return lambda rng, here: rng.choice(values)(rng, here)


_NUMBER = _one_of(
    *("0", "1", "2", "3", "10", "500", "501", "-1", "nan", "inf", "-inf", "1e400", "1e9", "0x10", "", " 5 ", "1_0"),
    *("9" * 23, "9" * 5000, "0.5", "-0", "1e-400", "\u0661", *_HOSTILE),
)
_AMOUNT = _one_of(
    *(
        "8GiB",
        "1GB",
        "2.3GiB",
        "0",
        "1",
        "140KiB",
        "147456",
        "143.9KiB",
        "auto",
        "x",
        "-1GiB",
        "nan",
        "1.1B",
        "",
        "8 GiB",
    ),
    *("9" * 30 + "GiB", "9" * 5000, "1e3", "8G", "9223372036854775807", "9223372036854775808", *_HOSTILE),
)
_RATE = _one_of(
    *(
        "25GB/s",
        "1B/s",
        "0GB/s",
        "0.1B/s",
        "0.0001KB/s",
        "25GB",
        "/s",
        "",
        "nan/s",
        "9223372036854775807/s",
        "1 TB / s",
    ),
    *("9" * 30 + "/s", *_HOSTILE),
)
_METHOD = _one_of("prefill", "decode", "forward", "nope", "", *_HOSTILE)
_PLACEMENT = _one_of("auto", "stream", "in-place", "split", "lru", "AUTO", "", *_HOSTILE)
_FUNCTION = _one_of(
    *(
        f"fuzz_models:{name}"
        for name in ("nothing", "leaving", "leaving_with_a_word", "broken", "ended", "deep", "junk")
    ),
    *("fuzz_models:value", "fuzz_models:nope", "nope:f", "fuzz_models", ":", "fuzz_models:", ":f", "..:f", "a..b:f"),
    *("sys:exit", "os:getcwd", "builtins:print", "fuzz_models.x:f", "", *(f"{text}:{text}" for text in _HOSTILE)),
)
_PROGRAM = _file(".pt2", ".pte")
_INPUTS = _file(".pt", ".npz", ".safetensors")
_WEIGHTS = _file(".ptd", ".pt2")
_ANYTHING = _one_of("--no-such-option", "-x", "--json=1", "--", "extra", "--help", "-h", "--version", *_HOSTILE)

# By command: what stands alone, and what each option takes; None: a flag.
_GRAMMAR: Mapping[str, tuple[tuple[Value, ...], Mapping[str, Value | None]]] = {
    "doctor": ((), {"--folder": _file(".pt2", ".folder")}),
    "export": (
        (_FUNCTION,),
        {
            "-o": _output(".pt2", ".pte"),
            "--output": _output(".pt2", ".pte"),
            "--method": _mixed(_METHOD, lambda rng, here: f"{_METHOD(rng, here)}={_FUNCTION(rng, here)}"),
            "--weights": _file(".safetensors", ".folder"),
            "--device": _one_of("cpu", "cuda", "cuda:99", "tpu", "", "cpu:0", "cpu:-1", *_HOSTILE),
            "--budget": _AMOUNT,
            "--overwrite": None,
            "--split-linear": None,
        },
    ),
    "inspect": ((_file(".pt2", ".pte", ".ptd"),), {"--top": _NUMBER, "--schedule": None}),
    "plan": (
        (_PROGRAM,),
        {
            "--budget": _AMOUNT,
            "--gpu-memory": _AMOUNT,
            "--link": _RATE,
            "--copy-latency-us": _NUMBER,
            "--step-times": _file(".json", ".pt2"),
            "--compute-bandwidth": _RATE,
            "--placement": _PLACEMENT,
            "--method": _METHOD,
            "--curve": _output(".html", ".html", ".gif"),
            "--points": _one_of("2", "3", "1", "501", "nan", "-1", "9" * 30, "", "x"),
        },
    ),
    "run": (
        (_PROGRAM,),
        {
            "--budget": _AMOUNT,
            "--inputs": _INPUTS,
            "--method": _METHOD,
            "--placement": _PLACEMENT,
            "--host-memory": _one_of("registered", "64KiB", "1GiB", "staged", "", "x"),
            "--repeat": _NUMBER,
            "--weights": _WEIGHTS,
            "--trace": _output(".json"),
            "--write-step-times": _output(".json"),
            "--out": _output(".pt", ".npz", ".safetensors"),
        },
    ),
    "verify": (
        (_file(".pt2"),),
        {"--weights": _WEIGHTS, "--inputs": _INPUTS, "--method": _METHOD, "--seed": _NUMBER, "--no-run": None},
    ),
    "cache": (
        (_one_of("list", "clear", "nope", "", *_HOSTILE),),
        {"--cache-dir": _file(".folder", ".pt2"), "--programs": None, "--weights": None, "--yes": None},
    ),
    "bench": ((_one_of("--small", "x", "--layers", *_HOSTILE),), {"--out": _output(".folder"), "--layers": _NUMBER}),
}
# Without these little is reached.
_USUAL = {"export": ("-o",), "run": ("--inputs",), "plan": ("--budget",)}
_OUTPUTS = ("-o", "--output", "--curve", "--trace", "--write-step-times", "--out")


def command_line(rng: random.Random, subjects: Path, here: Path) -> tuple[list[str], set[str]]:
    """The arguments, and the names of files that they ask for."""
    if rng.random() < 0.02:
        return [_ANYTHING(rng, here) for _ in range(rng.randrange(3))], set()
    command = rng.choice(tuple(_GRAMMAR))
    positional, options = _GRAMMAR[command]
    chosen = [name for name in options if rng.random() < 0.25]
    chosen += [name for name in _USUAL.get(command, ()) if name not in chosen and rng.random() < 0.9]
    parts: list[list[str]] = []
    outputs: set[str] = set()
    for name in chosen:
        value = options[name]
        if value is None:
            parts.append([name])
            continue
        text = value(rng, here)
        if name in _OUTPUTS:
            outputs |= {Path(text).name, f"{Path(text).stem}.ptd"}
        parts.append([f"{name}={text}"] if name.startswith("--") and rng.random() < 0.3 else [name, text])
    parts += [[value(rng, here)] for value in positional if rng.random() < 0.95]
    if rng.random() < 0.5:
        parts.append(["--json"])
    if rng.random() < 0.1:
        parts.append([_ANYTHING(rng, here)])
    rng.shuffle(parts)
    return [command, *(word for part in parts for word in part)], outputs


# --------------------------------------------------------------------------------------------------------- the subjects


@cache
def _subjects() -> Path:
    """A folder of files that commands are pointed at, for the life of this process."""
    from tests.cli.conftest import write_metadata
    from tests.cli.test_inspect import pte, two_methods

    folder = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = two_methods()
    sound = write_metadata(folder / "sound.pt2", program)
    write_metadata(folder / "baked.pt2", dataclasses.replace(program, budget_bytes=1 << 20))
    weights = [dataclasses.replace(program.weights[0], name="\x1b[31mred\nname", aliases=("[red]",))]
    write_metadata(folder / "hostile.pt2", dataclasses.replace(program, unused=("\x1b[31m", "a\nb", "[red]")))
    write_metadata(folder / "surrogate.pt2", dataclasses.replace(program, unused=("\x1b[31m", "\ud800")))
    write_metadata(folder / "other.pt2", dataclasses.replace(program, identity="\x1b[31m"))
    write_ptd(folder / "sound.ptd", program.weights, lambda w: [bytes(w.nbytes)], states=(), identity=program.identity)
    write_ptd(folder / "hostile.ptd", weights, lambda w: [bytes(w.nbytes)], states=(), identity="\x1b[31m")
    pte(folder / "sound.pte", sound)
    torch.save(torch.ones(2), folder / "tensor.pt")
    torch.save({"args": 5, "kwargs": [1]}, folder / "arguments.pt")
    torch.save({"0": torch.ones(1), "arr_0": torch.ones(1), 3: torch.ones(1)}, folder / "numbers.pt")
    torch.save({"\x1b[31m": torch.ones(1).to_sparse()}, folder / "sparse.pt")
    link = {"bytes_per_s": 1e9, "copy_latency_s": 0.0}
    times = {method.name: [1e-3] * len(method.schedule.steps) for method in program.methods}
    (folder / "sound.json").write_text(json.dumps({"link": link, "step_s": times}))
    (folder / "nan.json").write_text(json.dumps({"link": link, "step_s": {"prefill": [float("nan")] * 8}}))
    (folder / "other.json").write_text(json.dumps({"link": link, "step_s": {"\x1b[31m": [1.0]}}))
    (folder / "fuzz_models.py").write_text(_MODELS)
    _add_odd(folder)
    return folder


def _add_odd(folder: Path) -> None:
    """Of every kind: empty, junk, cut off, with changed bytes, and what is no file."""
    rng = random.Random(0)
    for suffix in (".pt2", ".pte", ".ptd", ".pt", ".npz", ".safetensors", ".json"):
        (folder / f"empty{suffix}").touch()
        (folder / f"junk{suffix}").write_bytes(b"\x80\x02]q")
        (folder / f"noise{suffix}").write_bytes(rng.randbytes(3000))
        (folder / f"folder{suffix}").mkdir()
        (folder / f"dangling{suffix}").symlink_to("nowhere")
        (folder / f"device{suffix}").symlink_to("/dev/zero")
        os.mkfifo(folder / f"pipe{suffix}")
        sources = [path for path in (folder / f"sound{suffix}", folder / f"tensor{suffix}") if path.exists()]
        for source in sources:
            content = source.read_bytes()
            for number in range(6):
                (folder / f"cut{number}{suffix}").write_bytes(content[: rng.randrange(len(content))])
                changed = bytearray(content)
                for _ in range(1 << number):
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                (folder / f"changed{number}{suffix}").write_bytes(changed)
    (folder / "some.folder").mkdir()


def _listed(folder: Path) -> list[tuple[str, int, int]]:
    states = [(path, path.lstat()) for path in folder.iterdir() if not path.name.startswith(("here-", "__pycache__"))]
    return sorted((path.name, state.st_size, state.st_mtime_ns) for path, state in states)


# ---------------------------------------------------------------------------------------------------------- the calling


def _called(rng: random.Random, line: list[str], here: Path) -> tuple[int, str, str]:
    """In this process, in a folder of its own; what would take minutes is replaced by what it may answer."""
    answers = [ChildFailure("\x1b[31mno answer"), ChildFailure("")]
    suite = SimpleNamespace(returncode=rng.choice((0, 1, 2, 7, -9)))
    earlier, paths, temporary = Path.cwd(), list(sys.path), tempfile.tempdir
    tempfile.tempdir = str(here.parent)
    sys.path.insert(0, str(here.parents[1]))
    os.chdir(here)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch("penstock.cli.doctor_checks.ask_child", side_effect=rng.choice(answers)))
            stack.enter_context(patch("penstock.cli.bench.subprocess.run", return_value=suite))
            # Not the cache of whoever runs this.
            # Nor is the delegate built for a .pte: it is refused, whatever this process has loaded before.
            nowhere = {"PENSTOCK_CACHE_DIR": "no cache", "PENSTOCK_EXECUTORCH_LIBRARY": "no library.so"}
            stack.enter_context(patch.dict(os.environ, {name: str(here / place) for name, place in nowhere.items()}))
            streams = stack.enter_context(_captured())
            code = main(line)
        stdout, stderr = streams
    finally:
        os.chdir(earlier)
        sys.path[:] = paths
        tempfile.tempdir = temporary
    assert sorted(path.name for path in here.parent.iterdir()) == ["here"], "temporary files are left"
    return code, stdout, stderr


@contextmanager
def _captured() -> Iterator[list[str]]:
    """What is written to 1 and 2, by whomever; it is there when the block has ended."""
    said: list[str] = []
    earlier: tuple[Any, Any] = (sys.stdout, sys.stderr)
    for stream in earlier:
        stream.flush()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir="/tmp")) for _ in range(2)]
        kept = [os.dup(number) for number in (1, 2)]
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        try:
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = earlier
            for number, duplicate in enumerate(kept, 1):
                os.dup2(duplicate, number)
                os.close(duplicate)
            for file in files:
                file.seek(0)
                said.append(file.read().decode())
