"""Mutation check: small faults put into the core one at a time (tests/runtime/mutants.py). Each must be missed.

Whichever scenario misses it will do, for all of them force their orders: none waits for time to pass. What no scenario
can miss stands in EQUIVALENT, with the reason. A wait, record or condition that is added without a scenario turns this
red.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtime.builds import SOURCES, WORKERS, build_core, play
from tests.runtime.mutants import Mutant, Mutated

FILES = [
    *("session/streaming_session.cpp", "session/planned_session.cpp", "session/planned_capture.cpp"),
    *("session/lru_session.cpp", "packed/packed_source.cpp", "host/staging.cpp"),
    *("timing/stall_meter.cpp", "timing/trace.cpp"),
    *("session/planned_experts.cpp", "experts/expert_calls.cpp"),
]
THOROUGH = ("session/planned_experts.cpp", "experts/expert_calls.cpp")
# They make tensors, and scenarios know no torch: tests/runtime/test_module_runs.py does.
NEED_TORCH = {"fetch", "tensor_at", "fetched_position", "forget_tensors", "multiply_groups"}

NEVER_RECORDED = "an event that was never recorded is no wait"
GIVES_BACK_NOTHING = "to give back what is not there fails, and nobody is told"
HAS_WAITED = "whoever closes a session, or changes its plan, has waited for the link and given up its slots"
ASKED_BY_TORCH = "what experts are asked for, and where none have slots, tensors say: tests/experts/test_modules.py"
A_GUARD = "no compiled program asks for other experts than its plan has"
NOTHING_COUNTED = "a plan that has banks has tables, and one that has none counts nothing"
LATER_SLOT = "that slot was used after this one, and is freed behind it on the same stream"
EQUIVALENT = {
    "trace.cpp step_begins: if (open_step_ < 0) taken for true": "the span that was open has no end, and is dropped",
    "streaming_session.cpp follow_last_run: if (has_run_) taken for true": NEVER_RECORDED,
    "streaming_session.cpp finish: if (has_run_) taken for true": NEVER_RECORDED,
    "streaming_session.cpp drain: if (has_run_) taken for true": NEVER_RECORDED,
    "planned_session.cpp begin_run: if (has_run_) taken for true": NEVER_RECORDED,
    "lru_session.cpp release: if (held.has_been_read) taken for true": NEVER_RECORDED,
    "staging.cpp await_copy: if (!buffer.copying) taken for false": NEVER_RECORDED,
    "streaming_session.cpp done: if (!error().empty()) taken for false": "the abort that must follow undoes it",
    "streaming_session.cpp finish: if (mode_ == Mode::run || mode_ == Mode::replay) taken for true": (
        "more is waited for than must be"
    ),
    "streaming_session.cpp time_copies: source_.follow({}, {}) left out": "the first run says what is to be read",
    "streaming_session.cpp time_copies: driver_.synchronize_stream(copy_stream_) left out": (
        "how much of the link's work lies between two events is a matter of time, which a clock of ticks does not tell"
    ),
    "streaming_session.cpp count: if (!run_.replays) taken for true": "front ends tell no stall of a replay",
    "planned_session.cpp create_memory: if (record.bytes == 0) taken for false": "the planner makes no empty range",
    "planned_session.cpp uninstall: if (!range.bytes) taken for false": "the planner makes no empty range",
    "planned_session.cpp create_events: if (record.copies[c].wait_step >= 0) taken for true": (
        "every copy of the planner's waits: for the last reader of its own pages"
    ),
    "planned_session.cpp issue: if (record.wait_step >= 0) taken for true": (
        "every copy of the planner's waits: for the last reader of its own pages"
    ),
    "planned_session.cpp find_in_place: if (access.is_split()) taken for false": (
        "only a linear asks where the rest lies: tests/runtime/test_split.py"
    ),
    "planned_session.cpp fill_residents: source_.follow({}, {}) left out": "uninstall has done it, unless that failed",
    "planned_session.cpp give_packed_memory: source_.follow({}, {}) left out": (
        "uninstall has done it, unless that failed"
    ),
    "planned_session.cpp uninstall: source_.follow({}, {}) left out": "fill_residents does it again",
    "planned_session.cpp measure: if (bytes >= kMeasuredBytes) taken for false": "it bounds how long a load takes",
    "planned_session.cpp uninstall: if (event) taken for true": GIVES_BACK_NOTHING,
    "planned_session.cpp uninstall: if (event) taken for true (2)": GIVES_BACK_NOTHING,
    "planned_session.cpp uninstall: if (*event) taken for true": GIVES_BACK_NOTHING,
    "planned_session.cpp uninstall: if (range.mapped_bytes) taken for true": GIVES_BACK_NOTHING,
    "lru_session.cpp uninstall: if (held_[w].address) taken for true": GIVES_BACK_NOTHING,
    "lru_session.cpp uninstall: if (held_[w].ready) taken for true": GIVES_BACK_NOTHING,
    "lru_session.cpp uninstall: if (held_[w].read) taken for true": GIVES_BACK_NOTHING,
    "lru_session.cpp uninstall: if (pool_) taken for true": GIVES_BACK_NOTHING,
    "staging.cpp release: if (buffer.copied) taken for true": GIVES_BACK_NOTHING,
    "staging.cpp release: if (buffer.memory) taken for true": GIVES_BACK_NOTHING,
    "trace.cpp ~Trace: if (span.begin) taken for true": GIVES_BACK_NOTHING,
    "trace.cpp ~Trace: if (span.end) taken for true": GIVES_BACK_NOTHING,
    "staging.cpp release: if (entered) taken for true": "the soft driver knows no current device",
    "staging.cpp release: if (entered) taken for false": "the soft driver knows no current device",
    "planned_session.cpp issue: driver_.wait_external(copy_stream_, lead_) too late": (
        "who waits for the stay waits for what follows both"
    ),
    "planned_session.cpp issue: driver_.wait_external(copy_stream_, lead_) with compute_": (
        "the kernels that read the stay stand behind it there too"
    ),
    "planned_session.cpp issue: if (progress.unread) taken for true": "only the last recording before a wait counts",
    "planned_session.cpp step_ended: if (step.seen_outside) taken for true": "nobody waits for the others",
    "planned_session.cpp reset: forget_copies(method) left out": "after a failure every run is cold, and forgets them",
    "planned_capture.cpp create_capture_events: if (step.ended) taken for true": "nobody waits for the others",
    "planned_capture.cpp capture_begins: if (!method.graph_copies) taken for false": "a branch without copies is none",
    "lru_session.cpp allocate: driver_.synchronize_stream(copy_stream_) with compute_": (
        "the compute stream has just been told to wait for the copies"
    ),
    "lru_session.cpp step_ended: if (record_.weights[access.weight].bytes == 0) taken for false": (
        "what has no bytes is never held, so nobody asks for its readers"
    ),
    "staging.cpp Staging: if (error.failure == Failure::sticky) taken for true": (
        "what a failure is told as: tests/runtime/test_driver_faults.py"
    ),
    "staging.cpp extent_at: if (cycle_.empty()) taken for false": "a division by 0, which not every processor refuses",
    "staging.cpp read_extent: if (got < 0 && errno == EINTR) taken for false": "it needs a signal inside of a read",
    "packed_source.cpp ~PackedSource: finish() left out": HAS_WAITED,
    "packed_source.cpp ~PackedSource: give_up_slots() left out": HAS_WAITED,
    "packed_source.cpp take_memory: finish() left out": HAS_WAITED,
    "packed_source.cpp take_memory: give_up_slots() left out (2)": "what uninstalls the plan that failed does it again",
    "packed_source.cpp give_up_slots: if (event) taken for true": GIVES_BACK_NOTHING,
    "packed_source.cpp pass_through_in_graph: driver_.wait(link_, slot.freed_in_graph) with the previous "
    "freed_in_graph": LATER_SLOT,
    "packed_source.cpp pass_through_in_graph: driver_.record(slot.freed_in_graph, stream) too late": (
        "there are two slots or more: another is filled before anybody waits for this one"
    ),
    "packed_source.cpp pass_through_in_graph: driver_.record(slot.freed_in_graph, stream) with the previous "
    "freed_in_graph": LATER_SLOT,
    "packed_source.cpp decode_on_host: driver_.synchronize_stream(stream) left out": (
        "what is left of a failed install nobody reads, and memory that was given back can often still be read"
    ),
    "packed_source.cpp load: driver_.wait(link_, slot.freed) with the previous freed": LATER_SLOT,
    "packed_source.cpp load: driver_.wait(link_, slot.freed) with the next freed": LATER_SLOT,
    "packed_source.cpp load: driver_.record(slot.freed, stream) with the previous freed": LATER_SLOT,
    "packed_source.cpp load: driver_.record(slot.freed, stream) with the next freed": LATER_SLOT,
    "packed_source.cpp pass_through_in_graph: if (captured_left_-- <= slots_.size()) taken for true": (
        "only the last recording of a launch counts"
    ),
    "packed_source.cpp begin_capture: if (!captured_left_) taken for false": "a branch without copies is none",
    "planned_experts.cpp move_of: experts < 1 left out of experts < 1 || access.bytes % experts || "
    "access.bytes / experts != row_bytes || (access.bank >= 0 && plan_.banks[(size_t)access.bank].experts != "
    "experts)": A_GUARD,
    "planned_experts.cpp move_of: access.bytes % experts left out of experts < 1 || access.bytes % experts "
    "|| access.bytes / experts != row_bytes || (access.bank >= 0 && plan_.banks[(size_t)access.bank].experts "
    "!= experts)": A_GUARD,
    "planned_experts.cpp move_of: access.bytes / experts != row_bytes left out of experts < 1 || "
    "access.bytes % experts || access.bytes / experts != row_bytes || (access.bank >= 0 && "
    "plan_.banks[(size_t)access.bank].experts != experts)": A_GUARD,
    "planned_experts.cpp move_of: (access.bank >= 0 && plan_.banks[(size_t)access.bank].experts != experts) "
    "left out of experts < 1 || access.bytes % experts || access.bytes / experts != row_bytes || "
    "(access.bank >= 0 && plan_.banks[(size_t)access.bank].experts != experts)": A_GUARD,
    "planned_experts.cpp move_of: access.bank >= 0 left out of access.bank >= 0 && "
    "plan_.banks[(size_t)access.bank].experts != experts": ASKED_BY_TORCH,
    "planned_experts.cpp move_of: if (access.bank < 0) taken for false": ASKED_BY_TORCH,
    "planned_experts.cpp take_rows: if (plan_.methods[(size_t)method_].accesses[(size_t)position].range != "
    "kDirect) taken for true": ASKED_BY_TORCH,
    "planned_experts.cpp take_rows: if (plan_.methods[(size_t)method_].accesses[(size_t)position].range != "
    "kDirect) taken for false": ASKED_BY_TORCH,
    "planned_experts.cpp retire_expert_counts: if (plan_.banks.empty() || !has_tables_) taken for "
    "false": NOTHING_COUNTED,
    "planned_experts.cpp retire_expert_counts: plan_.banks.empty() left out of plan_.banks.empty() || "
    "!has_tables_": NOTHING_COUNTED,
    "planned_experts.cpp retire_expert_counts: !has_tables_ left out of plan_.banks.empty() || "
    "!has_tables_": NOTHING_COUNTED,
    "trace.cpp collect: if (std::abs(distance_ns) > kNearNs) taken for true": "measured from a place still nearer",
}


def mutated() -> Mutated:
    made = Mutated(SOURCES, FILES, NEED_TORCH, thorough=THOROUGH)
    # What comes too late comes behind the next work that the host issues.
    name = "soft/soft_driver.cpp"
    soft = (SOURCES / name).read_text()
    begin = soft.index("{\n", soft.index("void SoftDriver::enqueue(")) + 2
    made.texts[name] = f'#include "mutants.h"\n{soft[:begin]}  mutants::AfterThis after;\n{soft[begin:]}'
    return made


def test_what_is_excused_is_there() -> None:
    """And every kind of fault is."""
    names = {mutant.name for mutant in mutated().mutants}
    assert set(EQUIVALENT) <= names and len(names) > 400
    for kind in ("left out", "too late", "taken for true", "taken for false", "with the previous", "with compute_"):
        assert any(kind in name for name in names), kind


@pytest.mark.slow
def test_every_fault_is_missed(tmp_path: Path) -> None:
    made = mutated()
    library = build_core(tmp_path, ["-O1"], made.texts)

    def plays(mutants: list[Mutant]) -> dict[int, str]:
        numbers = [f"{mutant.function}:{mutant.number}" for mutant in mutants]
        played = play(library, "tests.runtime.mutant_plays", *numbers)
        assert played.returncode == 0, played.stderr
        return {int(number): name for number, name in map(str.split, played.stdout.splitlines())}

    # A mutant that hangs keeps nobody busy: twice as many as there are cores for.
    count = 2 * WORKERS
    with ThreadPoolExecutor(count) as workers:
        parts = [made.mutants[start::count] for start in range(count)]
        missed = {number: name for part in workers.map(plays, parts) for number, name in part.items()}
    assert len(missed) == len(made.mutants)
    survivors = [one.name for one in made.mutants if missed[one.number] == "survived" and one.name not in EQUIVALENT]
    assert not survivors, f"done to the core, and nothing went wrong: {survivors}"
