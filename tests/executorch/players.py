"""One program opened in three ways: a .pt2 from Python, a .pte from Python, a .pte from a process in C++."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

import penstock
from penstock.executorch.failures import failure
from penstock.runtime.module import Module


class Player(Protocol):
    """What all of them can do, with the exceptions of penstock.errors."""

    def open(self, program: Path, weights: Path, budget: int | str | None) -> None: ...
    def run(self, method: str, x: Tensor) -> Tensor: ...
    def set_budget(self, budget: int | str) -> None: ...
    def budget_bytes(self) -> int: ...
    def figure(self, name: str) -> int: ...
    def read_state(self, name: str, like: Tensor) -> Tensor: ...
    def write_state(self, name: str, value: Tensor) -> None: ...
    def reset_state(self) -> None: ...
    def close(self) -> None: ...


class PythonPlayer:
    """penstock.Module, of either kind of file."""

    def __init__(self) -> None:
        self._module: Any = None

    def open(self, program: Path, weights: Path, budget: int | str | None) -> None:
        self._module = penstock.Module(program, budget, weights=weights)

    def run(self, method: str, x: Tensor) -> Tensor:
        result: Tensor = self._opened.run_method(method, x)
        return result

    def set_budget(self, budget: int | str) -> None:
        self._opened.set_budget(budget)

    def budget_bytes(self) -> int:
        return self._opened.budget_bytes

    def figure(self, name: str) -> int:
        return int(getattr(self._opened.stats(), name))

    def read_state(self, name: str, like: Tensor) -> Tensor:
        return self._opened.read_state(name)

    def write_state(self, name: str, value: Tensor) -> None:
        self._opened.write_state(name, value)

    def reset_state(self) -> None:
        self._opened.reset_state()

    def close(self) -> None:
        if self._module is not None:
            self._module.close()

    @property
    def _opened(self) -> Module:
        assert self._module is not None
        module: Module = self._module
        return module


class CppPlayer:
    """tests/executorch/behaviour_probe.cpp, which has no Python in it."""

    def __init__(self, binary: Path, log: IO[str] | None = None) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([str(binary)], stdin=pipe, stdout=pipe, stderr=log, text=True)

    def open(self, program: Path, weights: Path, budget: int | str | None) -> None:
        self._ask("open", program, weights, "-" if budget is None else budget)

    def run(self, method: str, x: Tensor) -> Tensor:
        dtype = str(x.dtype).removeprefix("torch.")
        found = self._ask("run", method, *x.shape, dtype, x.contiguous().numpy().tobytes().hex())
        return torch.frombuffer(bytearray.fromhex(found), dtype=torch.float32).view(x.shape[0], -1)

    def set_budget(self, budget: int | str) -> None:
        self._ask("budget", budget)

    def budget_bytes(self) -> int:
        return self.figure("budget")

    def figure(self, name: str) -> int:
        return int(self._ask("figure", name))

    def read_state(self, name: str, like: Tensor) -> Tensor:
        found = self._ask("read", name, like.nbytes)
        return torch.frombuffer(bytearray.fromhex(found), dtype=like.dtype).view(like.shape)

    def write_state(self, name: str, value: Tensor) -> None:
        self._ask("write", name, value.contiguous().numpy().tobytes().hex())

    def reset_state(self) -> None:
        self._ask("reset")

    def close(self) -> None:
        self._ask("close")
        self._process.communicate()
        assert self._process.returncode == 0

    def _ask(self, command: str, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, (command, *words))) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().rstrip("\n")
        assert answer, f"the process ended with {self._process.wait()}"
        if answer.startswith("ok"):
            return answer[3:]
        _, status, kind, detail, text = answer.split(" ", 4)
        raise failure(command, int(status), int(kind), int(detail), text, is_call=command == "run")
