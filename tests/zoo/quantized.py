"""Quantized variants of the other models: torchao int8 and int4 weight-only, and plain modules with packed int4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Case, decoder, freeze, hf

GROUP = 32


def torchao_int8(module: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # set_inductor_config would change process-wide Inductor settings, and with them every later compilation.
    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
    return module


def torchao_int4(module: nn.Module) -> nn.Module:
    """The CPU int4 format of torchao: weights packed for aten._weight_int4pack_mm_for_cpu.

    Every packing format of the stock Int4WeightOnlyConfig needs a GPU, an NPU or a separate kernel package at
    quantization time; the CPU format belongs to a prototype config, which has had more than one name.
    """
    from torchao.prototype.quantization import int4
    from torchao.quantization import quantize_

    config_class = getattr(int4, "PrototypeInt4WeightOnlyConfig", None) or int4.Int4WeightOnlyConfig
    quantize_(module, config_class(group_size=GROUP, set_inductor_config=False))
    return module


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric per-group int4 along the last dimension: (uint8 with two values a byte, scale, zero)."""
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp_min(1e-6) / 15
    zero = -low / scale
    q = (groups / scale + zero).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    packed = q[..., 0::2] | (q[..., 1::2] << 4)
    return packed, scale.squeeze(-1).to(weight.dtype), zero.squeeze(-1).to(weight.dtype)


def unpack_int4(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    groups = q.unflatten(-1, (-1, GROUP)).to(scale.dtype)
    return ((groups - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2)


class PackedWeight(nn.Module):
    """Holds one weight as buffers: integers cannot be parameters that require grad, and checkpoints must keep them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        packed, scale, zero = pack_int4(weight)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def forward(self, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return unpack_int4(self.packed, self.scale, self.zero)
        # Select before dequantizing, so that only the chosen experts are expanded.
        return unpack_int4(self.packed[rows], self.scale[rows], self.zero[rows])


class Int4Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = PackedWeight(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class Int4Experts(nn.Module):
    """Stands in for a transformers experts module: 3-D weights, computed like its "batched_mm" implementation."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = PackedWeight(experts.gate_up_proj)
        self.down_proj = PackedWeight(experts.down_proj)
        self.act_fn = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, top_k = top_k_index.shape
        ids = top_k_index.reshape(-1)
        x = hidden_states.repeat_interleave(top_k, dim=0).unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up_proj(ids), x).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(self.down_proj(ids), (self.act_fn(gate) * up).unsqueeze(-1)).squeeze(-1)
        y = y * top_k_weights.reshape(-1, 1)
        return y.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def packed_int4(module: nn.Module) -> nn.Module:
    """HQQ-style: every nn.Linear becomes plain buffers and arithmetic, without a tensor subclass or a custom kernel."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and child.in_features % GROUP == 0:
            setattr(module, name, Int4Linear(child))
        else:
            packed_int4(child)
    return module


def packed_experts(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if hasattr(child, "gate_up_proj") and hasattr(child, "down_proj"):
            setattr(module, name, Int4Experts(child))
        else:
            packed_experts(child)
    return module


Quantizer = Callable[[nn.Module], nn.Module]
QUANTIZERS: dict[str, Quantizer] = {"int8": torchao_int8, "int4": torchao_int4, "packed_int4": packed_int4}


def quantized(case: Case, quantizer: Quantizer) -> Case:
    """Quantizes the module of `case` in place."""
    return case._replace(module=freeze(quantizer(case.module)))


def quantized_decoder(kind: str, cfg: decoder.DecoderConfig = decoder.TINY) -> Case:
    return quantized(decoder.cache_free(cfg), QUANTIZERS[kind])


def quantized_methods(kind: str, cfg: decoder.DecoderConfig = decoder.TINY, *, device: str = "cpu") -> dict[str, Case]:
    cases = decoder.methods(cfg, device=device)
    # One module behind both methods, so it is quantized once. ("int4" packs with a CPU kernel: not on meta.)
    quantized(cases["prefill"], QUANTIZERS[kind])
    return cases


def quantized_qwen3_moe(kind: str, *, experts: bool = False, **options: Any) -> Case:
    """`experts` also packs the 3-D expert weights; torchao's `quantize_` only sees nn.Linear."""
    case = hf.qwen3_moe(**options)
    if experts:
        case = quantized(case, packed_experts)
    return quantized(case, QUANTIZERS[kind])
