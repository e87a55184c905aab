"""What each call must give, to the bit: the same compiled code with every weight on the device, asked once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

import penstock
from tests.harness import bits, leaves
from tests.runtime.modules import EVERYTHING
from tests.soak.programs import Kind

FIRST_STATE = 0
# A state is remembered with all of its bytes.
REMEMBERED = 2000


class Reference:
    """States are numbered; a call takes one number to another. Nothing is ever done to this module but running it."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self.kind = kind
        self._module = penstock.Module(path, EVERYTHING, **kind.options)
        self._names = [state.name for state in self._module.program.states]
        self._states: list[list[Tensor]] = []
        self._numbers: dict[bytes, int] = {}
        self._known: dict[tuple[int, int], tuple[list[Tensor], int]] = {}
        assert self.number_of(self._read()) == FIRST_STATE
        self._present = FIRST_STATE

    @property
    def state_names(self) -> list[str]:
        return self._names

    def number_of(self, values: list[Tensor]) -> int:
        digest = hashlib.blake2b(digest_size=16)
        for value in values:
            digest.update(bits(value).numpy().data)
        key = digest.digest()
        if key not in self._numbers:
            self._numbers[key] = len(self._states)
            self._states.append(values)
        return self._numbers[key]

    def values_of(self, number: int) -> list[Tensor]:
        return self._states[number]

    def after(self, number: int, call: int) -> tuple[list[Tensor], int]:
        """The bits of the outputs, and the state that follows."""
        if (number, call) not in self._known:
            if self._present != number:
                for name, value in zip(self._names, self._states[number], strict=True):
                    self._module.write_state(name, value)
            method, arguments = self.kind.calls[call]
            outputs = [bits(leaf) for leaf in leaves(self._module.run_method(method, *arguments))]
            self._present = self.number_of(self._read())
            self._known[number, call] = outputs, self._present
        return self._known[number, call]

    def forget(self) -> None:
        """Between sessions: states that nobody will come back to."""
        if len(self._states) > REMEMBERED:
            first = self._states[FIRST_STATE]
            self._states.clear()
            self._numbers.clear()
            self._known.clear()
            self.number_of(first)
            self._present = -1

    def _read(self) -> list[Tensor]:
        return [self._module.read_state(name) for name in self._names]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
