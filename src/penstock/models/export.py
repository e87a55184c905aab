"""From a language model on meta to the exported programs of its methods."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from penstock.errors import ModelError
from penstock.models.methods import Methods
from penstock.models.source_line import first_line, place
from penstock.models.stateful import traceable
from penstock.models.transformers_private import has_experts

# The length that torch.export traces a dynamic one with: not 1, which it would take for fixed, nor one used elsewhere.
_EXAMPLE_TOKENS = 11


def export_methods(model: Any, methods: Methods, only: str | None = None) -> dict[str, ExportedProgram]:
    """All methods, or one, of a model that make_stateful has converted."""
    return {name: _export_one(model, methods, name) for name in methods.names if only in (None, name)}


def _export_one(model: Any, methods: Methods, name: str) -> ExportedProgram:
    if name == "decode":
        return _export(model, methods, methods.decode_tokens, None, 0)
    if name == "chunk":
        return _export(model, methods, methods.prefill_tokens, None, 1)
    length = Dim("length", min=2, max=methods.prefill_tokens)
    return _export(model, methods, min(_EXAMPLE_TOKENS, methods.prefill_tokens), length, 1)


def _export(model: Any, methods: Methods, count: int, length: Any, kept_logits: int) -> ExportedProgram:
    device = next(model.parameters()).device
    model.kept_logits = kept_logits
    if has_experts(model):
        # The default loops over the experts that were routed to, which cannot be exported. batched_mm takes matrices
        # for each token, so it is for decode; grouped_mm reads each expert once for many tokens.
        model.set_experts_implementation("batched_mm" if count == methods.decode_tokens else "grouped_mm")
    arguments = [
        torch.ones(methods.batch, count, dtype=torch.int64, device=device),
        torch.zeros(methods.batch, dtype=torch.int64, device=device),
    ]
    if methods.takes_padding:
        arguments.append(torch.ones(methods.batch, methods.slots, dtype=torch.int64, device=device))
    shapes = None if length is None else ({1: length}, *[None] * (len(arguments) - 1))
    # The second attempt leaves checks that cannot be proven to the run.
    failures = []
    for deferred in (False, True):
        try:
            with traceable():
                return torch.export.export(
                    model,
                    tuple(arguments),
                    dynamic_shapes=shapes,
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=deferred,
                )
        except Exception as error:
            failures.append(error)
    raise ModelError(
        f"{type(model).__name__} does not export with {'a length that is left open' if length else f'{count} tokens'}: "
        f"{place(failures[0])}{first_line(failures[0])}. Tried: torch.export, and once more with its checks left to "
        f"the run ({first_line(failures[1])})"
    ) from failures[0]
