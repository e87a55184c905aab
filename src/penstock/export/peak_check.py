"""Holds the peaks that an export printed against their limits: python -m penstock.export.peak_check [LOG]

Reads the log from a file or from stdin, and of each line that peak_lines writes the last one. Limits, in MiB:
EXPORT_GPU_PEAK_MB_LIMIT (2048 unless given) and EXPORT_HOST_PEAK_MB_LIMIT (not checked unless given).
Exit status: 0 within the limits, 1 above one, 2 when a line or a limit is missing or malformed. Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from penstock.errors import PeakMemoryError
from penstock.export.peak import GPU_PEAK_LINE, HOST_PEAK_LINE

GPU_LIMIT_VARIABLE = "EXPORT_GPU_PEAK_MB_LIMIT"
HOST_LIMIT_VARIABLE = "EXPORT_HOST_PEAK_MB_LIMIT"
DEFAULT_GPU_LIMIT_MB = 2048


class MalformedError(ValueError):
    """A line or a limit is missing or is not a whole number of MiB."""


def check_peaks(log: Iterable[str], environment: Mapping[str, str]) -> str:
    """What was found, in one line. PeakMemoryError above a limit, MalformedError if it cannot tell."""
    lines = list(log)
    gpu_mb, host_mb = _last_value(lines, GPU_PEAK_LINE), _last_value(lines, HOST_PEAK_LINE)
    gpu_limit_mb = _limit(environment, GPU_LIMIT_VARIABLE)
    if gpu_limit_mb is None:
        gpu_limit_mb = DEFAULT_GPU_LIMIT_MB
    host_limit_mb = _limit(environment, HOST_LIMIT_VARIABLE)
    host_bound = f"not checked: {HOST_LIMIT_VARIABLE} is not set" if host_limit_mb is None else f"limit {host_limit_mb}"
    found = f"GPU peak {gpu_mb} MiB (limit {gpu_limit_mb}), host peak {host_mb} MiB ({host_bound})"

    above = []
    if gpu_mb > gpu_limit_mb:
        above.append(f"the GPU peak by {gpu_mb - gpu_limit_mb} MiB ({GPU_LIMIT_VARIABLE})")
    if host_limit_mb is not None and host_mb > host_limit_mb:
        above.append(f"the host peak by {host_mb - host_limit_mb} MiB ({HOST_LIMIT_VARIABLE})")
    if above:
        raise PeakMemoryError(f"{found}: above the limit is {' and '.join(above)}")
    return found


def _last_value(lines: Sequence[str], name: str) -> int:
    values = [line.strip()[len(name) :] for line in lines if line.strip().startswith(name)]
    if not values:
        raise MalformedError(f"the log has no line '{name}: <MiB>'")
    match = re.fullmatch(r": ([0-9]{1,18})", values[-1])
    if match is None:
        raise MalformedError(f"the log's last line of this kind is '{name}{values[-1][:60]}', not '{name}: <MiB>'")
    return int(match[1])


def _limit(environment: Mapping[str, str], variable: str) -> int | None:
    text = environment.get(variable)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise MalformedError(f"{variable} is {text[:60]!r}; it must be a whole number of MiB, as in {variable}=2048")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.export.peak_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("log", nargs="?", type=Path, help="the log to read; stdin if not given")
    path: Path | None = parser.parse_args(arguments).log
    try:
        # A log holds whatever compilers wrote: bytes that are not text must not end the check.
        raw = sys.stdin.buffer.read() if path is None else path.read_bytes()
        print(f"within limits: {check_peaks(raw.decode(errors='replace').splitlines(), os.environ)}")
    except PeakMemoryError as error:
        print(f"ABOVE LIMITS: {error}", file=sys.stderr)
        return 1
    except (MalformedError, OSError) as error:
        print(f"cannot tell: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
