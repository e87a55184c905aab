"""docs/format.md and the library: a reader made from the page reads what it writes, and every rule has its tests."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from penstock.errors import PackageError
from penstock.program import FORMAT_VERSION, program_to_json
from penstock.program import read_program as library_reads
from penstock.weight import ITEM_BYTES, State
from penstock.weights import layout_identity, read_index
from penstock.weights.format import PAGE_BYTES, SCALAR_TYPES
from penstock.weights.metadata import METADATA_FORMAT, PACKED_METADATA_FORMAT
from penstock.weights.packing import pack
from tests.docs.pages import ROOT, read_page
from tests.docs.shared_program import SharedProgram
from tests.docs.spec_reader import identity, read_program, read_weights, tensor_elements
from tests.runtime.programs import a_program
from tests.weights.packed_cases import PACKED, earlier_code, packable
from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, Crafted, payload, write

PAGE = read_page("docs/format.md")

# The tests that break each rule and see the file refused.
REFUSALS: dict[str, tuple[str, ...]] = {
    "R1": ("tests/weights/test_ptd_refusals.py::test_something_else_is_refused",),
    "R2": (
        "tests/weights/test_ptd_refusals.py::test_a_short_header_is_refused",
        "tests/docs/test_format.py::test_a_longer_header_is_read",
    ),
    "R3": (
        "tests/weights/test_ptd_refusals.py::test_header_numbers_that_disagree_are_refused",
        "tests/weights/test_ptd_refusals.py::test_every_truncation_is_refused",
    ),
    "R4": (
        "tests/weights/test_ptd_refusals.py::test_an_index_too_large_to_hold_is_refused_unread",
        "tests/weights/test_ptd_refusals.py::test_metadata_too_large_to_hold_is_refused_unread",
    ),
    "R5": ("tests/weights/test_ptd_refusals.py::test_directories_and_pipes_are_refused",),
    "R6": (
        "tests/weights/test_ptd_refusals.py::test_a_damaged_flatbuffer_is_refused",
        "tests/weights/test_ptd_fuzz.py::test_every_byte_of_a_small_index_in_turn",
    ),
    "R7": ("tests/weights/test_ptd_refusals.py::test_a_damaged_flatbuffer_is_refused",),
    "R8": (
        "tests/weights/test_ptd_refusals.py::test_tables_that_cannot_be_are_refused",
        "tests/weights/test_ptd_refusals.py::test_a_damaged_flatbuffer_is_refused",
        "tests/weights/test_ptd_refusals.py::test_overlapping_keys_cannot_multiply_the_index",
    ),
    "R9": ("tests/weights/test_ptd_refusals.py::test_tables_that_cannot_be_are_refused",),
    "R10": ("tests/weights/test_ptd_refusals.py::test_tables_that_cannot_be_are_refused",),
    "R11": (
        "tests/weights/test_ptd_refusals.py::test_segments_of_one_shape_cannot_change_places",
        "tests/weights/test_ptd_refusals.py::test_metadata_that_disagrees_is_refused",
        "tests/docs/test_format.py::test_unknown_keys_of_the_metadata_are_ignored",
    ),
    "R12": ("tests/weights/test_ptd_refusals.py::test_a_longer_file_is_refused_when_it_is_ours",),
    "R13": ("tests/weights/test_ptd_refusals.py::test_tables_that_cannot_be_are_refused",),
    "R14": ("tests/weights/test_ptd_refusals.py::test_metadata_that_disagrees_is_refused",),
    "R15": (
        "tests/weights/test_ptd_checksum.py::test_one_flipped_bit_in_any_weight_is_found",
        "tests/weights/test_ptd_checksum.py::test_every_damaged_weight_is_listed",
    ),
    "R16": (
        "tests/test_program.py::test_files_that_are_no_files",
        "tests/test_program.py::test_files_that_are_no_programs",
        "tests/test_program.py::test_an_archive_that_would_expand_is_refused_unexpanded",
        "tests/test_program.py::test_damaged_archives",
        "tests/fuzz/test_slice.py::test_damaged_code_is_never_run",
        "tests/docs/test_format.py::test_two_descriptions_in_one_archive_are_refused",
    ),
    "R17": ("tests/test_program.py::test_another_format_version_is_refused_by_number",),
    "R18": (
        "tests/test_program.py::test_metadata_that_lacks_something",
        "tests/test_program.py::test_something_else_in_any_place_is_refused_or_taken_as_it_stands",
        "tests/test_program.py::test_without_a_new_seal_every_change_is_refused",
        "tests/test_program.py::test_two_states_of_one_shape_cannot_change_places",
        "tests/test_program.py::test_strides_cannot_change",
        "tests/test_program.py::test_numbers_that_are_none_are_refused",
        "tests/test_program.py::test_a_key_that_is_there_twice_is_refused",
    ),
    "R19": (
        "tests/test_program.py::test_every_rule_is_broken_by_name",
        "tests/test_program.py::test_what_would_take_for_ever_is_refused",
        "tests/plan/test_floor.py::test_a_schedule_that_breaks_its_own_rules_is_refused",
        "tests/plan/test_planner.py::test_a_schedule_that_breaks_its_own_rules_is_refused",
    ),
    "R20": (
        "tests/runtime/test_compatibility.py::test_another_torch_is_refused_with_both_versions",
        "tests/runtime/test_compatibility.py::test_another_machine_is_refused",
        "tests/runtime/test_compatibility.py::test_another_instruction_set_is_refused",
        "tests/runtime/test_compatibility.py::test_another_compute_capability_is_refused",
        "tests/runtime/test_compatibility.py::test_a_program_that_does_not_say_is_refused",
    ),
    "R21": (
        "tests/test_program.py::test_files_that_are_no_programs",
        "tests/fuzz/test_slice.py::test_code_of_another_program_is_refused_though_every_crc_is_right",
    ),
    "R22": (
        "tests/runtime/test_compatibility.py::test_every_missing_weight_and_stored_state_is_named",
        "tests/runtime/test_compatibility.py::test_what_does_not_fit_is_named_with_both_layouts",
    ),
    "R23": ("tests/runtime/test_compatibility.py::test_another_identity_is_refused_though_everything_fits",),
    "R24": ("tests/weights/test_packed_refusals.py::test_records_that_cannot_be_packed_are_refused",),
    "R25": (
        "tests/weights/test_packed_refusals.py::test_a_damaged_header_is_refused_by_name",
        "tests/weights/test_packed_refusals.py::test_a_damaged_table_is_refused_by_name",
    ),
    "R26": (
        "tests/weights/test_packed_damage.py::test_damaged_blocks_stay_within_their_buffers",
        "tests/weights/test_packed_damage.py::test_a_flipped_byte_anywhere_is_found",
    ),
    "R27": ("tests/weights/test_packed_refusals.py::test_plans_that_are_none_are_refused",),
    "R28": (
        "tests/executorch/test_packed_plans.py::test_damaged_plans_are_refused",
        "tests/executorch/test_packed_plans.py::test_plans_for_other_packed_weights_are_refused",
    ),
}


def test_every_rule_for_readers_has_its_tests() -> None:
    rules = re.findall(r"^- (R\d+):", PAGE, re.MULTILINE)
    assert rules == list(REFUSALS)
    for tests in REFUSALS.values():
        for test in tests:
            path, name = test.split("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{test} is not there"


def test_no_rule_for_readers_stands_outside_the_numbered_ones() -> None:
    """MUST in what a writer does is the writer's; anywhere else it belongs to a numbered rule."""
    for block in re.split(r"\n(?=\n|- |#)", PAGE):
        if "MUST" in block and not re.match(r"- R\d+:", block.strip()):
            writers = (
                PAGE.index("### What a writer does") < PAGE.index(block.strip()) < PAGE.index("### `penstock.json`")
            )
            assert writers or "RFC 2119" in block, block


def test_a_reader_made_from_the_page_reads_every_kind_of_weight(tmp_path: Path) -> None:
    weights = (*EVERY_KIND, TIED)
    write(tmp_path / "w.ptd", weights, STATES)
    read_identity, found = read_weights(tmp_path / "w.ptd")
    assert read_identity == layout_identity(weights, STATES)
    stored = [*weights, *(state for state in STATES if state.init == "stored")]
    names = [name for item in stored for name in (item.names if not isinstance(item, State) else (item.name,))]
    assert sorted(found) == sorted(names)
    for item in stored:
        for name in item.names if not isinstance(item, State) else (item.name,):
            entry = found[name]
            assert (entry.dtype, entry.shape, entry.dim_order) == (item.dtype, item.shape, item.dim_order)
            assert entry.kind == ("state" if isinstance(item, State) else "weight")
            assert entry.data == payload(item)
            assert entry.offset_bytes % 4096 == 0
            assert entry.checksum == f"{xxhash.xxh3_64_intdigest(entry.data, seed=0):016x}"
    offsets = [found[name].offset_bytes for name in names]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("code", [nullcontext, earlier_code])
def test_a_reader_made_from_the_page_unpacks(tmp_path: Path, code: Callable[[], AbstractContextManager[Any]]) -> None:
    path = packable(tmp_path / "w.ptd")
    with code():
        index = pack(path, tmp_path / "packed.ptd")
    plain, found = read_weights(path), read_weights(tmp_path / "packed.ptd")
    assert sum(entry.packing is not None for entry in index.unique_entries) == len(PACKED)
    assert found[0] == plain[0] and list(found[1]) == list(plain[1])
    for name, entry in found[1].items():
        assert entry.data == plain[1][name].data and entry.checksum == plain[1][name].checksum
        has_number = plain[1][name].scalar_type is not None and index[name].packing is None
        assert (entry.scalar_type is not None) == has_number


def test_the_page_s_dtypes_are_the_library_s() -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+|none) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert {dtype: int(number) for dtype, number, _ in rows if number != "none"} == SCALAR_TYPES
    assert {dtype: int(count) for dtype, _, count in rows} == ITEM_BYTES
    assert PAGE_BYTES == 4096 and (METADATA_FORMAT, PACKED_METADATA_FORMAT) == (2, 3)


def test_a_reader_made_from_the_page_reads_a_compiled_program(shared_program: SharedProgram) -> None:
    program = read_program(shared_program.path)
    read_identity, found = read_weights(shared_program.path.with_suffix(".ptd"))
    tensors = shared_program.named_tensors()
    assert identity(program) == program["identity"] == read_identity
    for weight in program["weights"]:
        for name in (weight["name"], *weight["aliases"]):
            tensor = tensors[name]
            entry = found[name]
            elements = tensor_elements(entry, tensor.element_size())
            assert (entry.dtype, list(entry.shape)) == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            read = torch.frombuffer(bytearray(b"".join(elements)), dtype=tensor.dtype).reshape(tensor.shape)
            assert torch.equal(read, tensor)
    for method in program["methods"]:
        numbers = [access[0] for access in method["schedule"]["accesses"]]
        assert {number for _, step in method["schedule"]["steps"] for number in step} == set(numbers)


def test_the_page_s_keys_are_those_that_are_written() -> None:
    document = json.loads(program_to_json(a_program()))
    tables = {
        "`penstock.json` of a program is one JSON object:": document,
        "A method:": document["methods"][0],
    }
    for heading, written in tables.items():
        rows = PAGE[PAGE.index(heading) :].split("\n\n")[1].splitlines()[2:]
        assert [re.match(r"\| `(\w+)` \|", row)[1] for row in rows] == list(written), heading  # type: ignore[index]
    for row, key in (("weights", "weights"), ("states", "states")):
        listed = re.search(rf"^\| `{row}` \| list of `{{([\w, ]+)}}`", PAGE, re.MULTILINE)
        assert listed is not None
        items = document[key] or [{"name": 0, "dtype": 0, "shape": 0, "dim_order": 0, "init": 0, "host": 0, "near": 0}]
        assert sorted(listed[1].split(", ")) == sorted(items[0])
    signature = re.search(r"^\| `signature` \| (.*) \|$", PAGE, re.MULTILINE)
    assert signature is not None
    assert re.findall(r"`(\w+)`", signature[1]) == list(document["methods"][0]["signature"])
    access = re.search(r"`accesses`, a list of `\[([\w, ]+)\]`", PAGE)
    assert access is not None
    assert len(access[1].split(", ")) == len(document["methods"][0]["schedule"]["accesses"][0])
    assert f"| `format_version` | {FORMAT_VERSION} |" in PAGE


def test_a_longer_header_is_read(tmp_path: Path) -> None:
    """In a file of ExecuTorch's: in ours the header is a part of what is sealed."""
    crafted = Crafted()
    crafted.metadata = None
    path = crafted.write(tmp_path / "w.ptd")
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 12, 48)
    path.write_bytes(content)
    assert [entry.name for entry in read_index(path)] == ["first", "second", "again"]


def test_unknown_keys_of_the_metadata_are_ignored(tmp_path: Path) -> None:
    crafted = Crafted()
    crafted.metadata["later"] = {"a": [1]}
    crafted.entry(0)["later"] = None
    assert [entry.name for entry in read_index(crafted.write(tmp_path / "w.ptd"))] == ["first", "second", "again"]


def test_two_descriptions_in_one_archive_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/extra/penstock.json", program_to_json(a_program()))
        archive.writestr("other/extra/penstock.json", program_to_json(a_program()))
    path = tmp_path / "model.pt2"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(PackageError, match="it has 2 penstock.json, needs one"):
        library_reads(path)
