"""What of CUDA graphs needs no GPU: the memory that a graph's inputs are kept in, and the order of launches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import pytest
import torch

from penstock.runtime import graphs
from penstock.runtime.captured_pass import CapturedPass, _Kept
from penstock.runtime.graphs import ReplayTurns
from penstock.torch_private import workspaces


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(4, 6)[1:3, 2:5],
        torch.arange(3.0).expand(5, 3),
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(5),
    ],
    ids=["plain", "permuted", "slice", "expanded", "scalar", "empty", "integers"],
)
def test_an_input_is_kept_as_it_lies_in_memory(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        kept = _Kept(tensor)
    assert kept.tensor.shape == tensor.shape and kept.tensor.stride() == tensor.stride()
    for value in (tensor, tensor + 1 if tensor.is_contiguous() else tensor):
        kept.take(value)
        assert torch.equal(kept.tensor, value)
    assert kept.tensor.numel() == 0 or kept.tensor.data_ptr() != tensor.data_ptr()


class Device:
    """Stands in for streams, an event and a session: what each was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def record(self, stream: Stream) -> None:
        self.told.append(f"{stream.name} records")


class Stream:
    def __init__(self, name: str, device: Device) -> None:
        self.name, self._device = name, device

    def wait_event(self, event: Device) -> None:
        assert event is self._device
        self._device.told.append(f"{self.name} waits")


class Launches:
    def __init__(self, stream: Stream, device: Device, during: Any = lambda: None) -> None:
        self._stream, self._device, self._during = stream, device, during

    def launch(self) -> None:
        self._device.told.append(f"{self._stream.name} launches")
        self._during()


class WatchedLock:
    """Says when somebody comes to take it."""

    def __init__(self) -> None:
        self._lock, self.comers = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.comers.release()
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


def captured(outputs: list[torch.Tensor]) -> CapturedPass:
    """Without capturing, which takes a GPU."""
    made = CapturedPass.__new__(CapturedPass)
    made._inputs, made._written, made._outputs = [], (), outputs
    return made


def test_replays_of_two_threads_follow_one_another_on_the_device() -> None:
    """The second thread comes while the first is between its wait and its launch."""
    device, lock = Device(), WatchedLock()
    turns = ReplayTurns(device)  # type: ignore[arg-type]
    turns._launching = lock  # type: ignore[assignment]
    one, other = Stream("one", device), Stream("other", device)

    def replay(stream: Stream, during: Any = lambda: None) -> list[torch.Tensor]:
        session: Any = Launches(stream, device, during)
        return captured([torch.ones(2)]).replay(session, [], turns.turn(stream))  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:
        second: list[Any] = []

        def until_the_other_comes() -> None:
            lock.comers.acquire()
            second.append(pool.submit(replay, other))
            lock.comers.acquire()

        assert torch.equal(replay(one, until_the_other_comes)[0], torch.ones(2))
        second[0].result()
    wanted = ["one waits", "one launches", "one records", "other waits", "other launches", "other records"]
    assert device.told == wanted


def test_a_refused_launch_holds_up_no_other() -> None:
    device = Device()
    turns = ReplayTurns(device)  # type: ignore[arg-type]
    stream = Stream("one", device)

    def refuse() -> None:
        raise ZeroDivisionError

    for during in (refuse, lambda: None):
        session: Any = Launches(stream, device, during)
        with pytest.raises(ZeroDivisionError) if during is refuse else nullcontext():
            captured([]).replay(session, [], turns.turn(stream))  # type: ignore[arg-type]
    assert device.told == ["one waits", "one launches", "one records"] * 2


def test_modules_of_a_device_take_turns_and_keep_the_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_addressed", False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(torch.cuda, "Event", Device)
    monkeypatch.setattr(graphs, "capture_stream", graphs.capture_stream.__wrapped__)
    made = graphs.capture_stream(3)
    assert str(made.stream) == "stream of 3" and isinstance(made.replays._ended, Device)
    assert workspaces._addressed
