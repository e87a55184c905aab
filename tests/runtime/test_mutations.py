"""Mutation check: every wait, record and synchronization of the session deleted, one at a time. Each must be missed.

Which deletion is missed where stands in DELETIONS. A wait that is added without an entry there turns this test red.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.builds import SOURCES, WORKERS, Build, play
from tests.runtime.scenarios import SCENARIOS

FILES = ["streaming_session.cpp", "planned_session.cpp", "planned_capture.cpp", "lru_session.cpp", "staging.cpp"]
CALL = re.compile(
    r"(?:driver_\.(?:(?:wait|record)(?:_external)?|synchronize_\w+)|source_\.follow(?=\(method\.)|\bfinish|\bawait_copy)"
    r"\((?:[^()]|\([^()]*\))*\)"
)
FUNCTION = re.compile(r"^\S.*?(?:\w+::)+(~?\w+)\(")

# File, function and call; the scenario that goes wrong without it.
DELETIONS = {
    # S8
    "streaming_session.cpp follow_last_run: driver_.wait(compute_, run_end_)": "runs_follow_one_another",
    "streaming_session.cpp conclude: driver_.record(run_end_, compute_)": "runs_follow_one_another",
    "streaming_session.cpp abort: finish()": "a_failed_run_is_waited_for",
    "streaming_session.cpp finish: driver_.synchronize_stream(compute_)": "a_failed_run_is_waited_for",
    "streaming_session.cpp finish: driver_.synchronize_event(run_end_)": "closing_waits_for_kernels",
    "streaming_session.cpp finish: driver_.synchronize_stream(copy_stream_)": "closing_waits_for_copies",
    "streaming_session.cpp drain: driver_.synchronize_event(run_end_)": "draining_waits_for_kernels",
    "streaming_session.cpp drain: driver_.synchronize_stream(copy_stream_)": "draining_waits_for_copies",
    # S2
    "streaming_session.cpp wait_for_copy: driver_.wait(compute_, ready)": "kernels_wait_for_copies",
    # S7
    "streaming_session.cpp time_copies: driver_.record(begin, copy_stream_)": "the_link_is_measured",
    "streaming_session.cpp time_copies: driver_.record(end, copy_stream_)": "the_link_is_measured",
    "streaming_session.cpp time_copies: driver_.synchronize_event(end)": "the_link_is_measured",
    # S2, for what is resident
    "planned_session.cpp fill_residents: driver_.synchronize_stream(copy_stream_)": (
        "residents_are_in_place_before_a_run"
    ),
    "planned_session.cpp uninstall: finish()": "closing_waits_for_copies",
    "planned_session.cpp uninstall: driver_.synchronize_stream(copy_stream_)": "closing_waits_for_poison",
    "planned_session.cpp begin_run: source_.follow(method.entering, method.cycle)": "staging_follows_the_method",
    # S1
    "planned_session.cpp begin_run: driver_.wait(copy_stream_, run_end_)": "a_method_waits_for_the_last_one",
    "planned_session.cpp await_readers: driver_.wait(copy_stream_, step.ended)": "copies_wait_for_readers",
    "planned_session.cpp step_ended: driver_.record(step.ended, compute_)": "copies_wait_for_readers",
    # S2
    "planned_session.cpp announce: driver_.record(stay.ready, copy_stream_)": "kernels_wait_for_copies",
    # The same inside graphs, and S9
    "planned_session.cpp await_readers: driver_.wait(copy_stream_, step.ended_in_graph)": (
        "graph_copies_wait_for_readers"
    ),
    "planned_session.cpp step_ended: driver_.record(step.ended_in_graph, compute_)": "graph_copies_wait_for_readers",
    "planned_session.cpp announce: driver_.record(stay.ready_in_graph, copy_stream_)": "graph_kernels_wait_for_copies",
    "planned_session.cpp await_copies: driver_.wait(compute_, stay.ready_in_graph)": "graph_kernels_wait_for_copies",
    "planned_session.cpp await_copies: driver_.wait_external(compute_, stay.ready)": (
        "graph_kernels_wait_for_copies_made_before_it"
    ),
    "planned_session.cpp step_ended: driver_.record_external(step.ended, compute_)": (
        "copies_behind_a_graph_wait_for_its_readers"
    ),
    "planned_capture.cpp capture_begins: driver_.record(fork_, compute_)": "graph_copies_follow_those_made_before_it",
    "planned_capture.cpp capture_begins: driver_.wait(copy_stream_, fork_)": "graph_copies_follow_those_made_before_it",
    "planned_session.cpp issue: driver_.wait_external(copy_stream_, lead_)": (
        "graph_copies_follow_those_made_before_it"
    ),
    "planned_capture.cpp replay_begins: driver_.record(lead_, copy_stream_)": (
        "graph_copies_follow_those_made_before_it"
    ),
    "planned_capture.cpp replay_begins: driver_.wait(compute_, lead_)": (
        "a_graph_follows_copies_made_for_another_method"
    ),
    "lru_session.cpp install: driver_.synchronize_stream(copy_stream_)": "lru_tells_at_load_what_could_not_be_copied",
    "lru_session.cpp uninstall: finish()": "lru_closing_waits_for_kernels",
    # S4
    "lru_session.cpp uninstall: driver_.synchronize_stream(copy_stream_)": (
        "lru_gives_its_pool_back_before_it_makes_another"
    ),
    "lru_session.cpp allocate: driver_.synchronize_stream(copy_stream_)": (
        "lru_waits_for_the_device_when_its_pool_refuses"
    ),
    # S1
    "lru_session.cpp release: driver_.wait(copy_stream_, held.read)": "lru_copies_wait_for_readers",
    "lru_session.cpp step_ended: driver_.record(held.read, compute_)": "lru_copies_wait_for_readers",
    # S2
    "lru_session.cpp place: driver_.record(held.ready, copy_stream_)": "lru_kernels_wait_for_copies",
    # S10
    "staging.cpp release: await_copy(buffer)": "buffers_are_kept_until_a_wait_succeeds",
    "staging.cpp release: await_copy(buffer) (2)": "buffers_are_kept_until_a_wait_succeeds",
    "staging.cpp drop_order: await_copy(buffer)": "a_copy_outside_an_order_has_been_made_when_it_returns",
    "staging.cpp copy_next: driver_.record(buffer.copied, stream)": "buffers_wait_for_their_copies",
    "staging.cpp copy_next: driver_.synchronize_stream(stream)": "a_copy_without_an_event_is_waited_for",
    "staging.cpp fill: await_copy(buffer)": "buffers_wait_for_their_copies",
    "staging.cpp await_copy: driver_.synchronize_event(buffer.copied)": "buffers_wait_for_their_copies",
}


@dataclass(frozen=True)
class Site:
    file: str
    name: str
    begin: int
    end: int

    def without(self) -> str:
        text = (SOURCES / self.file).read_text()
        return text[: self.begin] + "(void)0" + text[self.end :]


def sites() -> Iterator[Site]:
    for file in FILES:
        seen: dict[str, int] = {}
        function, at = "", 0
        for line in (SOURCES / file).read_text().splitlines(keepends=True):
            if found := FUNCTION.match(line):
                function = found[1]
            # What is not indented defines a function; what follows // is no code.
            elif call := CALL.search(line.split("//")[0]):
                name = f"{file} {function}: {call[0]}"
                seen[name] = seen.get(name, 0) + 1
                if seen[name] > 1:
                    name += f" ({seen[name]})"
                yield Site(file, name, at + call.start(), at + call.end())
            at += len(line)


def test_every_wait_has_its_deletion() -> None:
    assert sorted(site.name for site in sites()) == sorted(DELETIONS)
    assert set(DELETIONS.values()) <= set(SCENARIOS)


def test_every_deletion_is_missed(tmp_path: Path) -> None:
    build = Build(tmp_path, ["-O0"])
    whole = play(build.library("whole"), "tests.runtime.scenarios", *sorted(set(DELETIONS.values())))
    assert whole.returncode == 0, whole.stderr

    def survives(numbered: tuple[int, Site]) -> str:
        number, site = numbered
        library = build.library(f"mutant{number}", site.file, site.without())
        try:
            played = play(library, "tests.runtime.scenarios", DELETIONS[site.name])
        except subprocess.TimeoutExpired:
            return ""
        return "" if played.returncode else site.name

    with ThreadPoolExecutor(WORKERS) as workers:
        survivors = [name for name in workers.map(survives, enumerate(sites())) if name]
    assert not survivors, f"deleted, and nothing went wrong: {survivors}"
