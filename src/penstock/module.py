"""penstock.Module: a file, loaded by the runtime that it is for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.module import Module as CompiledModule


class Module(CompiledModule):
    """Loads `path` (a .pt2 of penstock.compile) and its weights, and runs it within a budget of device bytes.

    Loading runs native code from the file: load only what you trust. Nothing of it is run before its format, its
    identity and its weights have been checked.

    A .pte gives a penstock.executorch.Module, whose surface is the same as far as ExecuTorch allows.
    """

    if not TYPE_CHECKING:  # type checkers then see the options themselves

        def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **keywords: Any) -> Any:
            if cls is not Module or Path(path).suffix != ".pte":
                return super().__new__(cls)
            # Here, because ExecuTorch need not be installed for anything else.
            from penstock import executorch

            return executorch.Module(path, *arguments, **keywords)
