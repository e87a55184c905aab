from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PeakMemoryError
from penstock.export import peak
from penstock.export.peak import PeakMeter, Peaks, peak_lines
from penstock.export.peak_check import MalformedError, check_peaks, main

MIB = 2**20
GPU, HOST = "EXPORT_GPU_PEAK_MEMORY_MB", "EXPORT_HOST_PEAK_MEMORY_MB"


def touch(nbytes: int) -> None:
    """Makes this many bytes resident, and gives them back to the kernel (a bytearray need not be given back)."""
    with mmap.mmap(-1, nbytes) as block:
        for at in range(0, nbytes, mmap.PAGESIZE):
            block[at] = 1


def can_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


needs_reset = pytest.mark.skipif(not can_reset(), reason="the kernel's high-water mark cannot be reset here")


@needs_reset
def test_the_peak_is_of_the_block_and_not_of_what_came_before() -> None:
    touch(300 * MIB)
    with PeakMeter("cpu") as meter:
        touch(100 * MIB)
    peaks = meter.peaks
    assert peaks.host_mark_was_reset
    grown = peaks.host_peak_bytes - peaks.host_start_bytes
    # The kernel counts in batches per CPU: a few MiB to either side.
    assert 90 * MIB <= grown <= 200 * MIB
    assert peaks.gpu_peak_bytes is None and peaks.gpu_peak_reserved_bytes is None


@needs_reset
def test_mapped_file_pages_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(b"\1" * (64 * MIB))
    with PeakMeter("cpu") as meter, file.open("rb") as opened:
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) == len(mapped) // mmap.PAGESIZE
    assert meter.peaks.host_peak_bytes - meter.peaks.host_start_bytes >= 55 * MIB


@needs_reset
def test_children_are_not_counted() -> None:
    with PeakMeter("cpu") as meter:
        subprocess.run([sys.executable, "-c", "x = bytearray(b'1') * (300 << 20)"], check=True)
    assert meter.peaks.host_peak_bytes - meter.peaks.host_start_bytes < 150 * MIB


def test_a_mark_that_cannot_be_reset_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    with PeakMeter("cpu") as meter:
        pass
    assert not meter.peaks.host_mark_was_reset
    assert meter.peaks.host_peak_bytes > 0
    lines = peak_lines(meter.peaks)
    assert len(lines) == 3
    assert lines[2].startswith("EXPORT_HOST_PEAK_MEMORY_NOTE: ") and "whole life of the process" in lines[2]
    assert check_peaks(lines, {})  # the note does not disturb the checker


def test_peaks_are_there_only_when_the_block_has_ended() -> None:
    meter = PeakMeter("cpu")
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = meter.peaks
    with pytest.raises(ZeroDivisionError), meter:
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = meter.peaks
        raise ZeroDivisionError
    assert meter.peaks.host_peak_bytes > 0


def test_one_meter_at_a_time() -> None:
    with PeakMeter("cpu"), pytest.raises(RuntimeError, match="already"):
        PeakMeter("cpu").__enter__()
    with PeakMeter("cpu"):
        pass


class Cuda:
    """Stands in for torch.cuda: records what is asked of which device."""

    def __init__(self, initialized: bool) -> None:
        self.initialized = initialized
        self.calls: list[tuple[str, str]] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def reset_peak_memory_stats(self, device: str) -> None:
        self.calls.append(("reset", device))

    def max_memory_allocated(self, device: str) -> int:
        self.calls.append(("allocated", device))
        return 5 * MIB + 1

    def max_memory_reserved(self, device: str) -> int:
        self.calls.append(("reserved", device))
        return 8 * MIB


def test_gpu_peaks_are_of_the_target_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cuda = Cuda(initialized=True)
    monkeypatch.setattr(torch, "cuda", cuda)
    with PeakMeter(torch.device("cuda", 1)) as meter:
        pass
    assert cuda.calls == [("reset", "cuda:1"), ("allocated", "cuda:1"), ("reserved", "cuda:1")]
    assert (meter.peaks.gpu_peak_bytes, meter.peaks.gpu_peak_reserved_bytes) == (5 * MIB + 1, 8 * MIB)
    assert peak_lines(meter.peaks)[0] == f"{GPU}: 6"


def test_cuda_that_was_never_initialised_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cuda = Cuda(initialized=False)
    monkeypatch.setattr(torch, "cuda", cuda)
    with PeakMeter("cuda") as meter:
        pass
    assert cuda.calls == []
    assert (meter.peaks.gpu_peak_bytes, meter.peaks.gpu_peak_reserved_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("gpu_bytes", "host_bytes", "gpu_mb", "host_mb"),
    [(None, 0, 0, 0), (0, 1, 0, 1), (MIB, MIB + 1, 1, 2), (2048 * MIB + 1, 3 * MIB, 2049, 3)],
)
def test_lines_round_up(gpu_bytes: int | None, host_bytes: int, gpu_mb: int, host_mb: int) -> None:
    peaks = Peaks(0, host_bytes, True, gpu_bytes, gpu_bytes)
    assert peak_lines(peaks) == [f"{GPU}: {gpu_mb}", f"{HOST}: {host_mb}"]


def log(gpu: object = 60, host: object = 9000) -> list[str]:
    return ["compiling", f"{GPU}: {gpu}", "noise", f"{HOST}: {host}", "done"]


def test_within_limits() -> None:
    message = check_peaks(log(2048), {})
    assert "GPU peak 2048 MiB (limit 2048)" in message
    assert "host peak 9000 MiB (not checked: EXPORT_HOST_PEAK_MB_LIMIT is not set)" in message
    message = check_peaks(log(), {"EXPORT_GPU_PEAK_MB_LIMIT": "60", "EXPORT_HOST_PEAK_MB_LIMIT": "9000"})
    assert message == "GPU peak 60 MiB (limit 60), host peak 9000 MiB (limit 9000)"


@pytest.mark.parametrize(
    ("lines", "limits", "above"),
    [
        (log(2049), {}, "the GPU peak by 1 MiB"),
        (log(61), {"EXPORT_GPU_PEAK_MB_LIMIT": "60"}, "the GPU peak by 1 MiB"),
        (log(), {"EXPORT_HOST_PEAK_MB_LIMIT": "8999"}, "the host peak by 1 MiB"),
        (log(1, 1), {"EXPORT_GPU_PEAK_MB_LIMIT": "0", "EXPORT_HOST_PEAK_MB_LIMIT": "0"}, "1 MiB .* and the host peak"),
    ],
)
def test_above_a_limit(lines: list[str], limits: dict[str, str], above: str) -> None:
    with pytest.raises(PeakMemoryError, match=f"GPU peak .* host peak .* above the limit is .*{above}"):
        check_peaks(lines, limits)


def test_the_last_line_of_each_counts() -> None:
    assert "GPU peak 7 MiB" in check_peaks([*log(9999, "garbage"), *log(7, 8)], {})
    with pytest.raises(MalformedError, match="garbage"):
        check_peaks([*log(7, 8), *log(7, "garbage")], {})


@pytest.mark.parametrize(
    ("lines", "limits", "message"),
    [
        ([], {}, f"no line '{GPU}: <MiB>'"),
        ([f"{GPU}: 1"], {}, f"no line '{HOST}: <MiB>'"),
        ([f"{HOST}: 1"], {}, f"no line '{GPU}: <MiB>'"),
        (["said that " + line for line in log()], {}, "no line"),
        (log(""), {}, "last line of this kind"),
        (log("1.5"), {}, "last line of this kind"),
        (log("-1"), {}, "last line of this kind"),
        (log("nan"), {}, "last line of this kind"),
        (log("1 2"), {}, "last line of this kind"),
        (log("\u0661"), {}, "last line of this kind"),
        (log("9" * 5000), {}, "last line of this kind"),
        ([*log(), f"{GPU} 5"], {}, "last line of this kind"),
        (log(), {"EXPORT_GPU_PEAK_MB_LIMIT": ""}, "EXPORT_GPU_PEAK_MB_LIMIT is ''"),
        (log(), {"EXPORT_GPU_PEAK_MB_LIMIT": "2GB"}, "EXPORT_GPU_PEAK_MB_LIMIT is '2GB'"),
        (log(), {"EXPORT_HOST_PEAK_MB_LIMIT": "-1"}, "EXPORT_HOST_PEAK_MB_LIMIT is '-1'"),
    ],
)
def test_malformed(lines: list[str], limits: dict[str, str], message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        check_peaks(lines, limits)


def test_exit_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("EXPORT_GPU_PEAK_MB_LIMIT", raising=False)
    monkeypatch.delenv("EXPORT_HOST_PEAK_MB_LIMIT", raising=False)
    file = tmp_path / "log"
    file.write_bytes(b"\xff\xfe not text\n" + "\n".join(log()).encode())
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    assert "60" in out and "9000" in out
    monkeypatch.setenv("EXPORT_GPU_PEAK_MB_LIMIT", "59")
    assert main([str(file)]) == 1
    error = capsys.readouterr().err
    assert "60" in error and "9000" in error
    monkeypatch.setenv("EXPORT_GPU_PEAK_MB_LIMIT", "sixty")
    assert main([str(file)]) == 2
    assert main([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


def test_as_a_program_on_stdin_and_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # from here on, importing torch is an ImportError
        "import runpy; runpy.run_module('penstock.export.peak_check', run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("EXPORT_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "EXPORT_HOST_PEAK_MB_LIMIT": "8999"}
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, input="\n".join(log()), env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 1, child.stderr
    assert "GPU peak 60 MiB (limit 2048), host peak 9000 MiB (limit 8999)" in child.stderr
