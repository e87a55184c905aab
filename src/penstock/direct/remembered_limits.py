"""Limits measured on a GPU and remembered for it: one file for each GPU in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.direct.launch_shape import Limits
from penstock.errors import OutputPathError
from penstock.store.cache_folder import cache_folder, make_private, writing

_FOLDER = "limits"
# Version of what is measured, and how. Limits of another version are measured again.
_FORMAT = 1
# More than any GPU or link has, so that a damaged file is ignored.
_MOST = {"host_ctas": 1024, "host_inflight_bytes": 1 << 30, "link_bytes_per_s": 1e13, "hbm_bytes_per_s": 1e14}

_LOG = logging.getLogger(__name__)


def gpu_key(device: torch.device) -> dict[str, str]:
    """Identifies the GPU in its slot: another of the same kind may have fewer lanes."""
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "uuid": str(properties.uuid), "cuda": str(torch.version.cuda)}


def read_limits(key: dict[str, str]) -> Limits | None:
    """None if nothing was remembered, or nothing that makes sense."""
    try:
        found = json.loads(_path(key).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or found.get("gpu") != key:
        return None
    return _limits(found.get("limits"))


def remember_limits(key: dict[str, str], limits: Limits) -> None:
    """A cache that cannot be written only costs the next start a measurement, so this logs a warning and goes on."""
    path = _path(key)
    text = json.dumps({"format": _FORMAT, "gpu": key, "limits": asdict(limits)}, indent=1)
    try:
        make_private(cache_folder())
        make_private(path.parent)
        with writing(path):
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(path)
    except OutputPathError as error:
        _LOG.warning("limits of %s were measured and cannot be remembered: %s", key["name"], error)


def known_limits(
    device: torch.device, measure: Callable[[torch.device], Limits], *, may_measure: bool
) -> Limits | None:
    """The remembered limits, else measures them now. None: nothing is remembered, and there is no room to measure."""
    key = gpu_key(device)
    found = read_limits(key)
    if found is not None or not may_measure:
        return found
    return measured_limits(device, measure)


def measured_limits(device: torch.device, measure: Callable[[torch.device], Limits]) -> Limits:
    """Measured anew, whatever is remembered."""
    limits = measure(device)
    remember_limits(gpu_key(device), limits)
    return limits


def _path(key: dict[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / _FOLDER / f"{name}.json"


def _limits(found: Any) -> Limits | None:
    if not isinstance(found, dict) or found.keys() != asdict(Limits()).keys():
        return None
    try:
        limits = Limits(**found)
    except ValueError:
        return None
    return limits if all(value <= _MOST.get(name, 1e3) for name, value in found.items()) else None
