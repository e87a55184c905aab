"""The program file: an ordinary .pt2 archive with the compiled methods, no weights, and the offload metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.export.pt2_archive import is_pt2_package

from penstock.errors import PackageError
from penstock.program import METADATA_FILE, Program, program_to_json
from penstock.torch_private.inductor import pack_archive


def pack_program(program: Program, files: Mapping[str, Sequence[str]]) -> bytes:
    """The archive as bytes: code only, so it is small, and writing it is left to the caller's rules for full disks."""
    packed = pack_archive(files, {METADATA_FILE: program_to_json(program)})
    if not is_pt2_package(packed):
        raise PackageError("torch packed something that it does not take for a .pt2 archive")
    return packed
