"""One program opened in three ways: a .pt2 from Python, a .pte from Python, a .pte from a process in C++."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

import penstock
from penstock.errors import PenstockError
from penstock.executorch.failures import failure
from penstock.runtime.module import Module

BUDGET = "weight_offload_budget"


class Player(Protocol):
    """What all of them can do, with the exceptions of penstock.errors."""

    # `own`: budgets of single methods.
    def open(
        self, program: Path, weights: Path, budget: int | str | None, own: Mapping[str, int | str] | None = None
    ) -> None: ...
    def run(self, method: str, x: Tensor) -> Tensor: ...
    def set_budget(self, budget: int | str, method: str = "") -> None: ...
    def budget_bytes(self, method: str = "") -> int: ...
    def figure(self, name: str) -> int: ...
    def read_state(self, name: str, like: Tensor) -> Tensor: ...
    def write_state(self, name: str, value: Tensor) -> None: ...
    def reset_state(self) -> None: ...
    def close(self) -> None: ...


class Recording:
    """Plays as another one does, and keeps what was refused."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.refusals: list[PenstockError] = []

    def __getattr__(self, name: str) -> Any:
        play = getattr(self._player, name)

        def recorded(*arguments: Any) -> Any:
            try:
                return play(*arguments)
            except PenstockError as error:
                self.refusals.append(error)
                raise

        return recorded


class PythonPlayer:
    """penstock.Module, of either kind of file."""

    def __init__(self) -> None:
        self._module: Any = None

    def open(
        self, program: Path, weights: Path, budget: int | str | None, own: Mapping[str, int | str] | None = None
    ) -> None:
        options: dict[str, Any] = {} if own is None else {"delegate_budgets": own}
        self._module = penstock.Module(program, budget, weights=weights, **options)

    def run(self, method: str, x: Tensor) -> Tensor:
        result: Tensor = self._opened.run_method(method, x)
        return result

    def set_budget(self, budget: int | str, method: str = "") -> None:
        self._sharing(method).set_budget(budget)

    def budget_bytes(self, method: str = "") -> int:
        return int(self._sharing(method).budget_bytes)

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

    def _sharing(self, method: str) -> Any:
        return self._module.delegates[method] if method else self._opened

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

    def open(
        self, program: Path, weights: Path, budget: int | str | None, own: Mapping[str, int | str] | None = None
    ) -> None:
        given = {} if budget is None else {BUDGET: budget}
        self.open_with(program, weights, given | {f"{BUDGET}:{name}": value for name, value in (own or {}).items()})

    def open_with(self, program: Path, weights: Path, options: Mapping[str, int | str]) -> None:
        self._ask("open", program, weights, *(word for option in options.items() for word in option))

    def run(self, method: str, x: Tensor) -> Tensor:
        dtype = str(x.dtype).removeprefix("torch.")
        found = self._ask("run", method, *x.shape, dtype, x.contiguous().numpy().tobytes().hex())
        return torch.frombuffer(bytearray.fromhex(found), dtype=torch.float32).view(x.shape[0], -1)

    def set_budget(self, budget: int | str, method: str = "") -> None:
        self.set_option(f"{BUDGET}:{method}" if method else BUDGET, budget)

    def set_option(self, name: str, value: int | str) -> None:
        self._ask("set", name, value)

    def budget_bytes(self, method: str = "") -> int:
        return self.figure(f"budget:{method}" if method else "budget")

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
