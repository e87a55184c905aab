"""Peak memory of an export: of the host process, and of the device that it compiles for.

Limits of the host number:
- It covers this process only. Children (the C++ compiler, Inductor's worker processes) are not in it.
- It counts resident pages, file-backed ones too. A checkpoint or a .ptd that is mapped and read counts as far as it
  was touched, although the kernel could drop those pages at any time. So it is an upper bound of what was needed.
- It excludes pages that were swapped out.
- It includes what the process held before the meter started: `host_start_bytes` says how much that was.
Limits of the GPU number: it is what torch's allocator handed out. It excludes the CUDA context and memory that others
took (the driver's own calls, other processes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GPU_PEAK_LINE = "EXPORT_GPU_PEAK_MEMORY_MB"
HOST_PEAK_LINE = "EXPORT_HOST_PEAK_MEMORY_MB"
HOST_PEAK_NOTE_LINE = "EXPORT_HOST_PEAK_MEMORY_NOTE"

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# The value that resets the high-water mark of the resident pages, and nothing else (man 5 proc).
_RESET_HIGH_WATER_MARK = "5"

# The marks belong to the whole process: an inner meter would reset those of the outer one.
_metering = threading.Lock()


@dataclass(frozen=True)
class Peaks:
    """What a PeakMeter measured."""

    host_start_bytes: int
    host_peak_bytes: int
    # True: the host peak covers the metered block. False: the kernel's mark could not be reset, and the host peak
    # covers the whole life of the process so far.
    host_mark_was_reset: bool
    # None when the target is not a GPU; 0 when it is one and nothing was allocated on it.
    gpu_peak_bytes: int | None
    gpu_peak_reserved_bytes: int | None


class PeakMeter:
    """Measures the block it encloses; `peaks` is there once the block has ended, also when it ended in an exception.

        with PeakMeter("cuda:0") as meter:
            ...
        print("\\n".join(peak_lines(meter.peaks)))

    One at a time in a process.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = str(device)
        self._peaks: Peaks | None = None
        self._host_start_bytes = 0
        self._host_mark_was_reset = False

    @property
    def peaks(self) -> Peaks:
        if self._peaks is None:
            raise RuntimeError("the metered block has not ended: there are no peaks yet")
        return self._peaks

    def __enter__(self) -> PeakMeter:
        if not _metering.acquire(blocking=False):
            raise RuntimeError("a PeakMeter is running in this process already: a second one would reset its marks")
        try:
            self._peaks = None
            self._reset_gpu_peak()
            self._host_mark_was_reset = _reset_host_mark()
            self._host_start_bytes = _status_bytes("VmRSS")
        except BaseException:
            _metering.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            gpu_peak_bytes, gpu_peak_reserved_bytes = self._gpu_peak_bytes()
            self._peaks = Peaks(
                host_start_bytes=self._host_start_bytes,
                host_peak_bytes=_status_bytes("VmHWM"),
                host_mark_was_reset=self._host_mark_was_reset,
                gpu_peak_bytes=gpu_peak_bytes,
                gpu_peak_reserved_bytes=gpu_peak_reserved_bytes,
            )
        finally:
            _metering.release()

    def _targets_gpu(self) -> bool:
        return self._device.partition(":")[0] == "cuda"

    def _reset_gpu_peak(self) -> None:
        if not self._targets_gpu():
            return
        import torch

        # Without a context there is nothing to reset, and asking would create one.
        if _cuda_is_initialized():
            torch.cuda.reset_peak_memory_stats(self._device)

    def _gpu_peak_bytes(self) -> tuple[int | None, int | None]:
        if not self._targets_gpu():
            return None, None
        import torch

        if not _cuda_is_initialized():
            return 0, 0
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)


def peak_lines(peaks: Peaks) -> list[str]:
    """The lines that peak_check reads, in MiB rounded up; 0 for a GPU that was not used."""
    lines = [
        f"{GPU_PEAK_LINE}: {_mib_rounded_up(peaks.gpu_peak_bytes or 0)}",
        f"{HOST_PEAK_LINE}: {_mib_rounded_up(peaks.host_peak_bytes)}",
    ]
    if not peaks.host_mark_was_reset:
        lines.append(f"{HOST_PEAK_NOTE_LINE}: the mark could not be reset; it covers the whole life of the process")
    return lines


def _cuda_is_initialized() -> bool:
    import torch

    # torch does not say what it returns.
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized()


def _reset_host_mark() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
    except OSError:
        # Not available in some containers. Peaks says so.
        return False
    return True


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            amount, unit = value.split()
            if unit != "kB":
                raise RuntimeError(f"{_STATUS}: {field} is in {unit!r}, not kB")
            return int(amount) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}: this kernel does not count resident pages")


def _mib_rounded_up(n: int) -> int:
    return -(-n // 2**20)
