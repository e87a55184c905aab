"""Everything needed to make a language model's program, or one method of it, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.export.offload import apply_weight_offload
from penstock.models.building import build_on_meta
from penstock.models.export import export_methods
from penstock.models.folder import open_checkpoint
from penstock.models.methods import Methods
from penstock.models.stateful import make_stateful


@dataclass(frozen=True)
class Recipe:
    name: str
    dtype: torch.dtype
    methods: Methods
    device: torch.device
    trust_remote_code: bool = False
    inductor_configs: Mapping[str, Any] = field(default_factory=dict)

    def exported(self, only: str | None = None) -> dict[str, ExportedProgram]:
        """Ready to be compiled: all methods, or one."""
        checkpoint = open_checkpoint(self.name, trust_remote_code=self.trust_remote_code)
        model = build_on_meta(checkpoint, self.dtype, trust_remote_code=self.trust_remote_code)
        methods = self.methods
        make_stateful(model, slots=methods.slots, batch=methods.batch, host_cache=methods.host_cache)
        programs = export_methods(model, self.methods, only)
        return {name: apply_weight_offload(program) for name, program in programs.items()}
