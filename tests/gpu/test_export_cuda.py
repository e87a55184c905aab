"""What only a GPU can show of the export side: kernels by Triton, templates, tuning, device memory while compiling."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.verify.module import PoisonedModule
from tests.export import test_hazards as hazards
from tests.harness import bits, compiled, leaves, offloaded
from tests.zoo import decoder, export, hf, quantized, unet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, value)


def run_poisoned(
    folder: Path, model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None, **options: Any
) -> PoisonedModule:
    """Compile on CUDA from a model that stays on the CPU; three runs, within bf16/fp32 rounding of eager on the GPU."""
    reference = copy.deepcopy(model).eval().cuda()
    before = torch.cuda.memory_allocated()
    result = compiled(folder, offloaded(model, args, dynamic_shapes), device="cuda", **options)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    module = PoisonedModule(result.program_path)
    first = None
    for _ in range(3):
        found = leaves(module(*on_cuda(args)))
        with torch.no_grad():
            wanted = leaves(reference(*on_cuda(args)))
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.device.type == "cuda"
            # A model may leave a result on the CPU in eager mode (a counter of a loop); compiled code has one device.
            torch.testing.assert_close(ours, theirs, check_stride=False, check_device=False, rtol=2e-2, atol=2e-2)
        if first is not None and not module.program.states:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, found, strict=True))
        first = [t.clone() for t in found]
    return module


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (hazards.Writes, (torch.randn(2, 4), torch.tensor([1, 4]))),
        (hazards.CustomWrite, (torch.randn(2, 4),)),
        (hazards.Returns, (torch.randn(4, 4),)),
        (hazards.Loop, (torch.tensor(0),)),
        (hazards.Complex, (torch.randn(8, 8),)),
        (hazards.Branches, (torch.ones(2, 4),)),
        (hazards.OnlyReturned, (torch.randn(4),)),
        (hazards.Tied, (torch.arange(5),)),
        (hazards.Layouts, (torch.randn(1, 3, 8, 8), torch.randn(2, 6))),
        (hazards.Odd, (torch.randn(4, 64),)),
        (hazards.Casts, (torch.randn(4, 16),)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hazards(tmp_path: Path, model: type[nn.Module], args: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    run_poisoned(tmp_path, model(), args)


class Epilogues(nn.Module):
    """Matrix products with epilogues that read further weights: templates fuse these into one kernel."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = torch.relu(layer(x)) * scale + scale
        return x


@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "benchmark_epilogue_fusion": False},
        {"combo_kernels": True},
        {"max_autotune": True, "coordinate_descent_tuning": True},
    ],
    ids=["default", "triton_templates", "combo", "max_autotune"],
)
def test_templates_and_combo_kernels(tmp_path: Path, configs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Epilogues().to(torch.bfloat16)
    module = run_poisoned(tmp_path, model, (torch.randn(64, 256, dtype=torch.bfloat16),), inductor_configs=configs)
    if configs.get("max_autotune_gemm_backends") == "TRITON":
        # Without a benchmark to decide, the epilogue is always fused: one kernel, three weights.
        assert any(len(step.accesses) >= 3 for step in module.program.methods[0].schedule.steps)


@pytest.mark.parametrize("configs", [{}, {"combo_kernels": True}], ids=["default", "combo"])
def test_independent_small_ops(tmp_path: Path, configs: dict[str, Any]) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.randn(64 + 8 * i)) for i in range(6))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.sin(x[: s.numel()]) * s for s in self.scales]

    run_poisoned(tmp_path, Wide(), (torch.randn(128),), inductor_configs=configs)


def test_user_triton_kernel_reads_a_weight(tmp_path: Path) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def scale_kernel(x_ptr, w_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < count
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask) * tl.load(w_ptr + offsets, mask), mask)

    @torch.library.triton_op("penstock_tests::scale", mutates_args={})
    def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(scale_kernel)[(triton.cdiv(x.numel(), 64),)](x, w, out, x.numel(), BLOCK=64)
        return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(256))
            self.b = nn.Parameter(torch.randn(256))
            self.lin = nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scale(self.lin(scale(x, self.a)), self.b)

    # A kernel by Triton exports only from a model on the GPU; the program is still compiled without its weights.
    model = Model().cuda().eval().requires_grad_(False)
    x = torch.randn(256, device="cuda")
    program = offloaded(model, (x,))
    assert not [s for s in program.graph_signature.output_specs if "MUTATION" in s.kind.name]
    result = compiled(tmp_path, program, device="cuda")
    module = PoisonedModule(result.program_path)
    assert {w.name for w in module.program.weights} == {"a", "b", "lin.weight", "lin.bias"}
    for _ in range(3):
        torch.testing.assert_close(module(x), model(x))


CONFIG = decoder.DecoderConfig(
    hidden=256, ff=512, layers=3, heads=8, kv_heads=2, vocab=1000, max_len=64, tied=True, dtype=torch.float32
)


@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_two_methods_share_a_cache(tmp_path: Path, source: str) -> None:
    cases = decoder.methods(CONFIG)
    model = copy.deepcopy(cases["prefill"].module).cuda()
    if source == "cuda":
        for case in cases.values():
            case.module.cuda()
        cases = {n: case._replace(args=on_cuda(case.args)) for n, case in cases.items()}
    programs = {name: penstock.apply_weight_offload(export(case)) for name, case in cases.items()}
    result = compiled(tmp_path, programs, device="cuda")
    module = PoisonedModule(result.program_path)
    with torch.no_grad():
        for seq in (8, 33):
            tokens, positions = torch.randint(0, 1000, (1, seq), device="cuda"), torch.arange(seq, device="cuda")
            torch.testing.assert_close(
                module.run_method("prefill", tokens, positions), model(tokens, positions), rtol=1e-3, atol=1e-3
            )
            for i in range(3):
                tokens, positions = (
                    torch.randint(0, 1000, (1, 1), device="cuda"),
                    torch.tensor([seq + i], device="cuda"),
                )
                torch.testing.assert_close(
                    module.run_method("decode", tokens, positions), model(tokens, positions), rtol=1e-3, atol=1e-3
                )


@pytest.mark.parametrize("name", ["unet", "bert", "t5", "vit", "qwen3_moe", "packed_int4"])
def test_models(tmp_path: Path, name: str) -> None:
    case = {
        "unet": lambda: unet.unet(channels_last=True),
        "bert": hf.bert,
        "t5": hf.t5,
        "vit": hf.vit,
        "qwen3_moe": lambda: hf.qwen3_moe(experts="batched_mm")._replace(dynamic_shapes=None),
        "packed_int4": lambda: quantized.quantized_decoder("packed_int4", dataclasses.replace(CONFIG, tied=False)),
    }[name]()
    run_poisoned(tmp_path, case.module, case.args, case.dynamic_shapes)


def _peak(folder: Path, *arguments: str) -> tuple[int, int]:
    command = [sys.executable, "-m", "bench.export_memory", "--out", str(folder), *arguments]
    output = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert output.returncode == 0, output.stderr[-3000:]
    peak = re.search(r"EXPORT_GPU_PEAK_MEMORY_MB: (\d+)", output.stdout)
    after = re.search(r"DEVICE_BYTES_AFTER: (\d+)", output.stdout)
    assert peak is not None and after is not None
    return int(peak.group(1)), int(after.group(1))


def test_device_peak_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """4 and 16 layers of Llama-3-8B's shape, both methods, caches included; the larger one capped as well."""
    shape = ["--hidden", "2048", "--ff", "5632", "--vocab", "32000", "--max-len", "2048", "--device", "cuda"]
    small, after_small = _peak(tmp_path, "--layers", "4", *shape)
    large, after_large = _peak(tmp_path, "--layers", "16", *shape, "--memory-fraction", "0.02")
    assert large <= small * 1.05 + 1
    assert after_small <= 1 << 20
    assert after_large <= 1 << 20
