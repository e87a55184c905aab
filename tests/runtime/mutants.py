"""Sources with many small faults in them, of which one at a time is switched on.

All mutants are one build: every place that can go wrong asks whether it is its turn (`penstock_mutant`). So hundreds of
them cost one compilation, and a fork each.

What is done to the code: calls that order or time things are left out, moved behind the next work of the host's, given
another event or another stream; conditions are taken for true and for false. What else, Rules say.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Calls that order, time or forget: without one of them something must go wrong.
DRIVER_CALL = re.compile(
    r"\bdriver_\.(?:(?:wait|record)(?:_external)?|synchronize_\w+|fill|(?:choose|move)_experts|copy_to_host)\("
)
OWN_CALL = re.compile(
    r"(?<![\w.>:~])(?:(?:source_\.|beneath_->)(?:follow|finish|poison|take_memory|begin_capture|end_capture)"
    r"|give_packed_memory|give_up_slots|finish|await_copy|poison|forget_copies|reset|announce|restore_progress|leave_capture"
    r"|stalls_\.\w+|trace_->\w+|set_shapes|await_readers|await_copies|fill_residents|drop_order|discard_run"
    r"|prepare_experts|empty_tables|begin_tables|retire_expert_counts|drain|choose|take|copy|add|admit_all|admit_most"
    r"|(?:registry\(\)|all)\.\w+\.(?:wait|erase|emplace|notify_all|insert)|session_->taken\(\)\.erase"
    r"|made->taken\(\)\.insert|session_\.reset)\("
)
CONDITION = re.compile(r"\bif \(")
# A condition that only refuses: what happens without it is for the tests of refusals to say.
REFUSAL = re.compile(r"\s*\{?\s*(?:throw|return fail\(|fail\()")
ELAPSED = re.compile(r"\bdriver_\.elapsed_ns\(")
LOCK = re.compile(r"\bstd::lock_guard<std::mutex> (\w+)\((.*)\);\n")
GOES_ON = re.compile(r"(?:&&|\|\||[^=!<>]=)\n$")
# What decides outside of an `if`: a bool that is declared, and the condition of a choice between two values.
DECLARED = re.compile(r"\bbool \w+ = ")
CHOICE = re.compile(r"(?:(?<![=!<>])= |\breturn |, )(?=[^,;]* \? )")
FUNCTION = re.compile(r"^\S.*?(?:\w+::)+(~?\w+)\(")
FREE_FUNCTION = re.compile(r"^(?:static |inline )?[\w:<>*& ]+? (\w+)\([^;]*$")
CLASS = re.compile(r"^class (\w+)")
DECLARES = re.compile(r"^(?:const )?[\w:]+(?:<[^=]*>)?[&*]? ?[&*]?\w+ = ")

# By the event in a call, what else could stand there.
NEIGHBOURS = "mutants::{which}({all}, &std::decay_t<decltype({all}[0])>::{field}, {event})"
WRONG_EVENTS: dict[str, list[str]] = {
    "step.ended": [
        "step.ended_in_graph",
        *("PREVIOUS methods_[method_].steps ended", "NEXT methods_[method_].steps ended"),
    ],
    "step.ended_in_graph": ["step.ended", "PREVIOUS methods_[method_].steps ended_in_graph"],
    "stay.ready": [
        "stay.ready_in_graph",
        *("PREVIOUS methods_[method_].stays ready", "NEXT methods_[method_].stays ready"),
    ],
    "stay.ready_in_graph": ["stay.ready", "PREVIOUS methods_[method_].stays ready_in_graph"],
    "held.read": ["held.ready", "PREVIOUS held_ read", "NEXT held_ read"],
    "held.ready": ["held.read", "PREVIOUS held_ ready", "NEXT held_ ready"],
    "buffer.copied": ["PREVIOUS buffers_ copied"],
    "slot.filled": ["slot.freed", "PREVIOUS slots_ filled", "NEXT slots_ filled"],
    "slot.freed": ["slot.filled", "PREVIOUS slots_ freed", "NEXT slots_ freed"],
    "slot.filled_in_graph": ["slot.freed_in_graph", "PREVIOUS slots_ filled_in_graph"],
    "slot.freed_in_graph": ["slot.filled_in_graph", "slot.freed", "PREVIOUS slots_ freed_in_graph"],
    "fork_": ["lead_"],
    "lead_": ["fork_"],
    "begin": ["end"],
    "end": ["begin"],
    "run.waits[run.used].before": ["run.waits[run.used].after", "run.waits[0].before"],
    "run.waits[run.used].after": ["run.waits[run.used].before", "run.waits[0].after"],
    "run.waits[run.used - 1].after": ["run.waits[0].after", "run.waits[run.used - 1].before"],
    "spans_[open_copy_].end": ["spans_[open_copy_].begin", "spans_[0].end"],
    "spans_[open_step_].begin": ["spans_[open_step_].end"],
    "spans_[open_step_].end": ["spans_[open_step_].begin", "spans_[0].end"],
    "span.end": ["span.begin"],
    "span.begin": ["span.end"],
    "near": ["base_"],
    "before.end": ["before.begin", "span.begin"],
}
WRONG_STREAMS = {"copy_stream_": "compute_", "compute_": "copy_stream_"}
# Of what goes on both the stream of the link and the one that a function was given.
BETWEEN_STREAMS = {"link_": "stream", "stream": "link_"}

SELECTOR = """
#include "mutants.h"
extern "C" { int penstock_mutant = 0; }
namespace penstock { namespace mutants {
std::function<void()>& deferred() { static thread_local std::function<void()> action; return action; }
} }
"""
HEADER = """
#pragma once
#include <functional>
#include <type_traits>
extern "C" int penstock_mutant;
namespace penstock { namespace mutants {
inline bool on(int number) { return penstock_mutant == number; }
// What a call became that comes too late: behind the next copy, fill or kernel.
std::function<void()>& deferred();
template <typename Action> void defer(Action action) { deferred() = action; }
struct AfterThis {
  ~AfterThis() {
    std::function<void()> action;
    action.swap(deferred());
    try { if (action) action(); } catch (...) {}
  }
};
// Of the neighbours that have such an event.
template <typename All, typename Field, typename Event> Event previous(All& all, Field field, Event own) {
  Event found = nullptr, last = nullptr;
  for (auto& one : all) { if (one.*field == own) found = last; if (one.*field) last = one.*field; }
  return found ? found : last;
}
template <typename All, typename Field, typename Event> Event next(All& all, Field field, Event own) {
  Event first = nullptr; bool seen = false;
  for (auto& one : all) {
    if (!(one.*field)) continue;
    if (seen) return one.*field;
    if (!first) first = one.*field;
    seen = one.*field == own;
  }
  return first;
}
} }
namespace penstock_executorch { namespace mutants = penstock::mutants; }
"""


@dataclass(frozen=True)
class Rules:
    """What is done to sources besides what is done to all."""

    # Calls that are left out.
    calls: re.Pattern[str] = OWN_CALL
    # Conditions that only refuse are taken for false, too: the plays say what is then refused no more.
    refusals: bool = False
    # Each part of a condition is left out, other decisions than `if` go wrong, and locks are not taken.
    parts: bool = False


CORE = Rules()
# Of a file whose conditions decide, and do not only guard.
THOROUGH = Rules(parts=True)


@dataclass(frozen=True)
class Mutant:
    number: int
    file: str
    function: str
    # What was done, and to which text.
    name: str


class Mutated:
    """Sources with all of their mutants, numbered from 1."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        skipped: Container[str] = (),
        rules: Rules = CORE,
        thorough: Container[str] = (),
    ) -> None:
        """`thorough`: of the files those whose conditions are taken apart, whatever the rules."""
        self.mutants: list[Mutant] = []
        self._skipped = skipped
        self._all_rules, self._rules = rules, rules
        self._thorough = thorough
        changed = {file: self._mutate(file, (folder / file).read_text()) for file in files}
        self.texts = {file: f'#include "mutants.h"\n{text}' for file, text in changed.items()}
        self.texts |= {"mutants.h": HEADER, "mutants.cpp": SELECTOR}

    def _number(self, file: str, function: str, what: str) -> str:
        name = f"{Path(file).name} {function}: {what}"
        count = sum(one.name == name or one.name.startswith(f"{name} (") for one in self.mutants)
        if count:
            name += f" ({count + 1})"
        self.mutants.append(Mutant(len(self.mutants) + 1, file, function, name))
        return f"mutants::on({len(self.mutants)})"

    def _mutate(self, file: str, text: str) -> str:
        self._rules = THOROUGH if file in self._thorough else self._all_rules
        lines, function, joined, at = [], "", "", 0
        for line in text.splitlines(keepends=True):
            at += len(line)
            if not line[0].isspace():
                found = FUNCTION.match(line) or FREE_FUNCTION.match(line) or CLASS.match(line)
                if found:
                    function = found[1]
                lines.append(line)
                continue
            # A statement may take several lines: up to where its parentheses are closed.
            joined += line
            if _depth(joined) > 0 or (self._rules.parts and GOES_ON.search(line)):
                continue
            mutable = function and function not in self._skipped
            lines.append(self._statement(file, function, joined, text[at:]) if mutable else joined)
            joined = ""
        return "".join(lines) + joined

    def _statement(self, file: str, function: str, text: str, following: str) -> str:
        code = text.split("//")[0] if text.count("\n") == 1 else text
        out, at = "", 0
        for begin, end, kind in _places(code, self._rules):
            refuses = kind == "condition" and REFUSAL.match(code[end + 1 :] + following) is not None
            out += text[at:begin] + self._changed(file, function, kind, code[begin:end], refuses)
            at = end
        return out + text[at:]

    def _changed(self, file: str, function: str, kind: str, text: str, refuses: bool) -> str:
        flat = " ".join(text.split())
        if kind == "condition":
            yes = self._number(file, function, f"if ({flat}) taken for true")
            out = f"{yes} ? true : "
            if not refuses or self._rules.refusals:
                out += f"{self._number(file, function, f'if ({flat}) taken for false')} ? false : "
            return f"{out}static_cast<bool>({self._parts(file, function, text)})"
        if kind == "decision":
            out = f"({self._number(file, function, f'{flat} taken for true')} ? true : "
            out += f"{self._number(file, function, f'{flat} taken for false')} ? false : "
            return f"{out}static_cast<bool>({self._parts(file, function, text)}))"
        if kind == "lock":
            name, of = LOCK.match(text + "\n").groups()  # type: ignore[union-attr]
            left_out = self._number(file, function, f"{flat} left out")
            return f"std::unique_lock<std::mutex> {name}({of}, std::defer_lock); if (!{left_out}) {name}.lock();"
        if kind == "elapsed":
            first, second = _arguments(text)
            turned = self._number(file, function, f"{flat} turned round")
            calls = f"{turned} ? driver_.elapsed_ns({second}, {first}) : "
            for wrong in WRONG_EVENTS.get(first, []):
                chosen = self._number(file, function, f"{flat} from {wrong}")
                calls += f"{chosen} ? driver_.elapsed_ns({wrong}, {second}) : "
            return f"({calls}{text})"
        out = f"{self._number(file, function, f'{flat} left out')} ? (void)0 : "
        if kind == "own call":
            return f"({out}(void)({text}))"
        name = text[: text.index("(")]
        arguments = _arguments(text)
        # What is copied to the host is read behind the call, and its place is gone soon.
        if not re.search(r"synchronize|copy_to_host", name):
            out += f"{self._number(file, function, f'{flat} too late')} ? mutants::defer([=] {{ {text}; }}) : "
        # What is waited for alone may be in a function that was given no other stream.
        streams = BETWEEN_STREAMS if file == "packed/packed_source.cpp" and len(arguments) > 1 else WRONG_STREAMS
        for index, argument in enumerate(arguments):
            for wrong in self._wrong(argument, streams):
                changed = [*arguments[:index], wrong[1], *arguments[index + 1 :]]
                chosen = self._number(file, function, f"{flat} with {wrong[0]}")
                out += f"{chosen} ? {name}({', '.join(changed)}) : "
        return f"({out}{text})"

    def _parts(self, file: str, function: str, text: str) -> str:
        """Each operand of the outermost && or || as if it were not there."""
        for sign, neutral in (("||", "false"), ("&&", "true")):
            operands = _split(text, sign)
            if self._rules.parts and len(operands) > 1:
                out = []
                for operand in operands:
                    flat = " ".join(operand.split())
                    left_out = self._number(file, function, f"{flat} left out of {' '.join(text.split())}")
                    inner = _unwrapped(operand)
                    nested = operand if inner is None else self._parts(file, function, inner)
                    out.append(f"({left_out} ? {neutral} : static_cast<bool>({nested}))")
                return f" {sign} ".join(out)
        return text

    def _wrong(self, argument: str, streams: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if argument in streams:
            yield streams[argument], streams[argument]
        for wrong in WRONG_EVENTS.get(argument, []):
            which, *rest = wrong.split()
            if rest and which in ("PREVIOUS", "NEXT"):
                of, field = rest
                text = NEIGHBOURS.format(which=which.lower(), all=of, field=field, event=argument)
                yield f"the {which.lower()} {field}", text
            else:
                yield wrong, wrong


def _depth(text: str) -> int:
    code = re.sub(r"//[^\n]*|\"(?:[^\"\\]|\\.)*\"|'.'", "", text)
    return code.count("(") - code.count(")")


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis that is open at `begin` is closed; behind it."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[begin], 0)
        begin += 1
    return begin


def _arguments(call: str) -> list[str]:
    inner, depth, parts = call[call.index("(") + 1 : -1], 0, [""]
    for letter in inner:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _split(text: str, sign: str) -> list[str]:
    depth, parts, at = 0, [""], 0
    while at < len(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if depth == 0 and text.startswith(sign, at):
            parts.append("")
            at += len(sign)
            continue
        parts[-1] += text[at]
        at += 1
    return parts


def _unwrapped(text: str) -> str | None:
    """What stands inside of parentheses that are all of it."""
    text = text.strip()
    return text[1:-1] if text.startswith("(") and _closing(text, 1) == len(text) else None


def _decisions(code: str) -> Iterator[tuple[int, int]]:
    for match in DECLARED.finditer(code):
        end = code.index(";", match.end())
        if " ? " not in code[match.end() : end]:
            yield match.end(), end
    for match in CHOICE.finditer(code):
        end = code.index(" ? ", match.end())
        if _depth(code[match.end() : end]) == 0:
            yield match.end(), end


def _places(code: str, rules: Rules) -> Iterator[tuple[int, int, str]]:
    """Of one statement, from left to right and none inside another."""
    found: list[tuple[int, int, str]] = []
    for match in CONDITION.finditer(code):
        end = _closing(code, match.end()) - 1
        inner = code[match.end() : end]
        if ";" not in inner and not DECLARES.match(inner):
            found.append((match.end(), end, "condition"))
    if rules.parts:
        found += [(match.start(), match.end() - 1, "lock") for match in LOCK.finditer(code)]
        found += [(begin, end, "decision") for begin, end in _decisions(code)]
    for pattern, kind in ((ELAPSED, "elapsed"), (DRIVER_CALL, "driver call"), (rules.calls, "own call")):
        for match in pattern.finditer(code):
            # Behind a return, in a list of members or in a condition a call is a value.
            before = code[: match.start()].rstrip()
            if kind != "elapsed" and not re.search(r"(?:[;{})]|else|^)$", before):
                continue
            if any(begin <= match.start() < end for begin, end, _ in found):
                continue
            end = _closing(code, match.end())
            if kind != "elapsed" and not re.match(r"\s*;", code[end:]):
                continue
            found.append((match.start(), end, kind))
    yield from sorted(found)
