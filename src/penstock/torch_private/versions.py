"""The torch versions that were tested, and the refusal of any other. Needs no torch.

A release joins the list when `make test-torch TORCH=<release>` has passed with it; the upper bound in pyproject.toml
moves with it.
"""

from __future__ import annotations

import os
import re

from penstock.errors import UntestedTorchError

TESTED = ("2.11", "2.12", "2.13")
OVERRIDE = "PENSTOCK_UNTESTED_TORCH"

# A release, of any patch, for any device. Nightlies and other builds before a release have more after their number.
_RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)?(?:\+[A-Za-z0-9.]+)?")


def is_tested(version: str) -> bool:
    release = _RELEASE.fullmatch(version)
    return release is not None and release[1] in TESTED


def check_torch_version(version: str) -> None:
    """UntestedTorchError for a version that was not tested, unless the environment says to go on."""
    if is_tested(version):
        return
    override = os.environ.get(OVERRIDE, "0")
    if override not in ("0", "1"):
        raise UntestedTorchError(f"{OVERRIDE} is {override!r}; it must be 0 or 1")
    if override == "0":
        raise UntestedTorchError(
            f"torch is {version}, which Penstock was not tested with; needs a release of torch {', '.join(TESTED)}. "
            "Penstock reads the order of the compiler's kernels through interfaces that change between versions. "
            f"Install one of these, or set {OVERRIDE}=1 to compile all the same, and then compare the program's "
            "results with the model's"
        )
