"""The program file: an ordinary .pt2 archive with the compiled methods, no weights, and the offload metadata."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.export.pt2_archive import is_pt2_package

from penstock.archive import CODE_FOLDER, METADATA_FILE, CodeFile
from penstock.errors import PackageError
from penstock.program import Program, program_from_archive, program_to_json
from penstock.torch_private.inductor import pack_archive


def pack_program(program: Program, files: Mapping[str, Sequence[str]]) -> bytes:
    """The archive as bytes: only code, so it is small; the caller writes it by its own rules for full disks."""
    code = sorted(_code(files), key=lambda entry: entry.name)
    packed = pack_archive(files, {METADATA_FILE: program_to_json(program, code)})
    if not is_pt2_package(packed):
        raise PackageError("torch packed something that it does not take for a .pt2 archive")
    # Read it as any reader will: only this shows that torch packed the files under the names that were sealed.
    program_from_archive(io.BytesIO(packed), "the packed program")
    return packed


def _code(files: Mapping[str, Sequence[str]]) -> Iterator[CodeFile]:
    for method, paths in files.items():
        for path in map(Path, paths):
            content = path.read_bytes()
            name = f"{CODE_FOLDER}{method}/{path.name}"
            yield CodeFile(name, len(content), hashlib.sha256(content).hexdigest())
