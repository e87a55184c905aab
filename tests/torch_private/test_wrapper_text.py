"""The reading of the generated wrapper, line by line: what is known is followed, and what is not is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from penstock.errors import CompileError, ScheduleError
from penstock.export.wrapper import check_handed_on, check_wrapper
from penstock.schedule import Access, Schedule, Step
from penstock.torch_private.wrapper_text import (
    OPS_OF_OTHER_NAMES,
    READER_SHIMS,
    VIEW_SHIMS,
    op_gives_view,
    read_wrapper,
)

INCLUDE = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch"

# One weight, fetched and read by step 0; step 1 reads nothing.
SCHEDULE = Schedule("run", (Access(7, "layer.weight"),), (Step("mm", (7,)), Step("add", ())))
FETCHED = """
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 1);
    auto arg0_1 = std::move(inputs[0]);
    AtenTensorHandle buf1_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_penstock_weight(7L, std::array<int64_t, 2>{8L, 8L}.cbegin(), 2,
        cached_torch_dtype_float32, cached_torch_device_type_cpu, 0, &buf1_handle));
    RAIIAtenTensorHandle buf1(buf1_handle);
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf1, {8L, 8L}, {8L, 1L}, "a; {text}"); }
    static constexpr int64_t int_array_0[] = {8L, 8L};
"""
READ = "    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(buf2, arg0_1, buf1));\n"
ENDS = "    penstock_done(0L);\n{late}\n    penstock_done(1L);\n    output_handles[0] = buf2.release();\n"


def wrapper(early: str = "", late: str = "", read: str = READ) -> str:
    body = FETCHED + read + early + "\n" + ENDS.replace("{late}", late)
    return (
        f"void Model::run_impl(\n    AtenTensorHandle* handles, // inputs\n    int x) {{{body}}} // Model::run_impl\n"
    )


def refusal(source: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_wrapper(source, SCHEDULE)
    return str(caught.value)


ALIGNED = """
    if ((reinterpret_cast<std::uintptr_t>(arg0_1.data_ptr()) & (16 -1)) != 0) {
        AOTI_TORCH_WARN("Input 0 was compiled as 16-bytes aligned; it is not");
        AtenTensorHandle arg0_1_aligned;
        aoti_torch_clone_preserve_strides(arg0_1, &arg0_1_aligned);
        arg0_1 = std::move(RAIIAtenTensorHandle(arg0_1_aligned));
    }
"""
HANDED = (
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, "
    "std::array<int64_t, 0>{}.data(), 3, std::array<AtenTensorHandle, 3>{arg0_1, buf2, buf3}.data()));"
)


@pytest.mark.parametrize(
    "line",
    [
        HANDED,
        HANDED.replace("arg0_1, buf2", "buf2, arg0_1"),
        ALIGNED + HANDED,
        "arg0_1.reset();",
        'if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(arg0_1, {8L}, {1L}, "input"); }',
    ],
)
def test_an_input_that_is_only_handed_on(line: str) -> None:
    check_handed_on(wrapper(read="", early=line), "run", {0: "cache.kv_0"})


@pytest.mark.parametrize(
    "line",
    [
        READ,
        "cpp_fused_add_0((const float*)(arg0_1.data_ptr()), (float*)(buf3.data_ptr()));",
        "auto buf4 = std::move(arg0_1);  // reuse",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_clone(arg0_1, &buf4_handle));",
        HANDED.replace("arg0_1", "reinterpret_tensor_wrapper(arg0_1, 2, int_array_0, int_array_1, 0L)"),
        HANDED.replace("buf2", "arg0_1.data_ptr()"),
        ALIGNED + READ,
        ALIGNED.replace("!= 0", "== 0"),
        ALIGNED.replace("AOTI_TORCH_WARN(", "use(arg0_1, "),
        ALIGNED.replace("    }", "        use(arg0_1);\n    }"),
    ],
)
def test_an_input_that_the_code_itself_reads(line: str) -> None:
    """Its sizes are not those that the code was compiled for."""
    with pytest.raises(
        CompileError, match="method 'run': the generated wrapper does more with state 'cache.kv_0' than"
    ):
        check_handed_on(wrapper(read="", early=line), "run", {0: "cache.kv_0"})


def test_an_input_that_is_not_there() -> None:
    with pytest.raises(CompileError, match="the generated wrapper takes no input 1, state 'cache.kv_0'"):
        check_handed_on(wrapper(), "run", {1: "cache.kv_0"})


def test_the_plain_wrapper_passes() -> None:
    check_wrapper(wrapper(), SCHEDULE)
    found = read_wrapper(wrapper())
    assert found is not None and not found.unknown
    assert [(call.kind, call.number) for call in found.calls] == [("access", 7), ("end of step", 0), ("end of step", 1)]
    assert [(mention.name, mention.calls_before) for mention in found.mentions] == [("buf1_handle", 1), ("buf1", 1)]
    assert read_wrapper("int main() {}") is None


# A second name for the weight in every spelling that Inductor has had.
ALIASES = [
    "auto late = std::move(buf1);",
    "auto& late = buf1;",
    "const auto& late = buf1;",
    "AtenTensorHandle late = buf1.get();",
    "RAIIAtenTensorHandle late(buf1_handle);",
    "ConstantHandle late = ConstantHandle(buf1);",
    "auto late = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf1, 2, int_array_0, int_array_0, 0L));",
    "CUdeviceptr late = reinterpret_cast<CUdeviceptr>(buf1.data_ptr());",
    "void* late = (void*)(buf1.data_ptr());",
    "AtenTensorHandle late[] = {arg0_1, buf1};",
    "RAIIAtenTensorHandle late;\n late = std::move(buf1);",
    "RAIIAtenTensorHandle late;\n if (flag) {\n late = std::move(buf1);\n } else {\n late = std::move(arg0_1);\n }",
    "AtenTensorHandle late;\n AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(buf1, &late));",
    "AtenTensorHandle late;\n AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(buf1, &late));",
    "AtenTensorHandle late;\n AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_view_dtype(buf1, 3, &late));",
    "AtenTensorHandle late;\n AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_view_as_complex(buf1, &late));",
    "StableTMADescriptor late;\n initTMADescriptor(&late.m, reinterpret_cast<void*>(*(&buf1)), 4, 2);",
    "auto between = std::move(buf1);\n auto late = std::move(between);",
]


@pytest.mark.parametrize("alias", ALIASES)
def test_another_name_is_followed(alias: str) -> None:
    check_wrapper(wrapper(early=alias), SCHEDULE)
    for use in ("cpp_fused_0((const float*)(late.data_ptr()));", "call_triton_poi_fused_0(late, buf2, 8L, stream);"):
        assert "late (access 7, weight 'layer.weight') is used after step 0" in refusal(wrapper(early=alias, late=use))


@pytest.mark.parametrize(
    "use",
    [
        READ,
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(arg0_1, buf2, &temporary_reference(buf1.get()), "
        "std::array<int64_t, 1>{c10::div_floor_integer(static_cast<int64_t>(s0), 2L)}.cbegin(), std::max(s0, 1L), "
        "scalar_to_tensor_handle(2.0), std::numeric_limits<double>::infinity(), &buf3_handle));",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_index_Tensor(arg0_1, "
        "std::array<const AtenTensorHandle*, 1>{&temporary_reference(buf1.get())}.data(), 1, &buf3_handle));",
        "cpp_fused_0((const float*)(buf1.data_ptr()), (float*)(buf2.data_ptr()));",
        "call_triton_poi_fused_0(buf1, buf2, 8L, this->device_idx_, stream, kernels, this->cubin_dir_);",
        "kernels.cutlass_gemm_0((const void*)(buf1.data_ptr()), stream);",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, nullptr, 1, "
        "std::array<AtenTensorHandle, 1>{buf1}.cbegin()));",
        "float item; AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_item_float32(buf1, &item));",
        "{ cpp_fused_0((const float*)(buf1.data_ptr())); }",
    ],
)
def test_a_read_counts_where_it_stands(use: str) -> None:
    check_wrapper(wrapper(early=use), SCHEDULE)
    assert "buf1 (access 7, weight 'layer.weight') is used after step 0" in refusal(wrapper(late=use))


def test_a_weight_among_the_outputs_is_used_to_the_end() -> None:
    for place in ("early", "late"):
        message = refusal(wrapper(**{place: "output_handles[1] = buf1.release();"}))
        assert "(access 7, weight 'layer.weight') is used after step 0" in message


@pytest.mark.parametrize(
    "harmless",
    [
        "buf1.reset();",
        "if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf1, {8L}, {1L}); }",
        "// buf1 is no more",
        "/* buf1 */ int x = 0;",
        'KernelContextGuard _ctx("aoti_torch_cpu_mm_out", R"(File "model.py", in forward { return buf1; )");',
        'AOTI_TORCH_CHECK(s0 != 0, "buf1 \\"; {");',
        # A variable of an inner block, under the same name.
        "{ AtenTensorHandle buf1;\n cpp_fused_0((const float*)(buf1.data_ptr())); }",
    ],
)
def test_what_reads_nothing_may_stand_anywhere(harmless: str) -> None:
    check_wrapper(wrapper(late=harmless), SCHEDULE)


def test_a_result_that_is_no_view_lives_on() -> None:
    made = "AtenTensorHandle own;\n AOTI_TORCH_ERROR_CODE_CHECK({call}(buf1, nullptr, &own));"
    for call in ("aoti_torch_cpu_convolution", "aoti_torch_clone", "aoti_torch_cpu_penstock_linear"):
        check_wrapper(
            wrapper(early=made.replace("{call}", call), late="cpp_fused_0((float*)(own.data_ptr()));"), SCHEDULE
        )


# Spellings that do not exist, which may come: they might keep the memory, and nobody would know for how long.
MADE_UP = [
    "auto late = share_storage(buf1);",
    "auto late = std::exchange(buf1, nullptr);",
    "auto late = torch::stable::Tensor(buf1);",
    "SharedTensorHandle late(buf1);",
    "auto late{Keeper{buf1}};",
    "auto late = std::vector<std::array<AtenTensorHandle, 1>>{buf1};",
    "auto late = (*keeper)(buf1);",
    "auto late = keepers[0](buf1);",
    "auto late = [&] { return buf1; };",
    "registry.emplace(1, buf1);",
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(buf2, arg0_1, buf1.keep()));",
    "cpp_fused_0(buf1->share(1));",
    "registry[0] += buf1;",
    "buf1.swap(other);",
    "buf1->keep();",
    "std::swap(buf1, late);",
    "keep(buf1);",
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_alias_tensor(buf1, &late));",
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_no_such_op(buf1, &late));",
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(buf2, arg0_1, lent(buf1)));",
    "AOTI_TORCH_CHECKED_CALL(aoti_torch_cpu_mm_out(buf2, arg0_1, buf1));",
    "if (keeps(buf1)) { int x = 0; }",
    "return buf1;",
    "using late = buf1;",
    "struct Late { AtenTensorHandle handle = buf1; };",
    # Calls of ours where they do not belong, or written otherwise.
    "if (flag) { penstock_done(0L); }",
    "penstock_done(step);",
    "auto late = aoti_torch_cpu_penstock_weight(8L, &late);",
]


@pytest.mark.parametrize("line", MADE_UP)
def test_a_new_spelling_is_refused_and_quoted(line: str) -> None:
    message = refusal(wrapper(early="    " + line))
    assert "and is of no known kind" in message
    quoted = re.search(r"no known kind: ['\"](.*)['\"]\. Nobody", message)
    assert quoted is not None and quoted[1] in line
    assert "mentions the weight 'layer.weight'" in message or "penstock_" in line


def test_every_op_that_torch_declares_is_decided() -> None:
    """Inductor calls ops through the functions that these headers declare."""
    declared: set[str] = set()
    for header in INCLUDE.rglob("*.h"):
        declared |= set(re.findall(r"\baoti_torch_(?:cpu|cuda|aten)_(\w+)\(", header.read_text()))
    # They take no tensor.
    declared -= {"caching_allocator_raw_alloc", "caching_allocator_raw_delete", "guard_set_index"}
    assert len(declared) > 150
    undecided = sorted(name for name in declared if op_gives_view(name) is None)
    assert not undecided, f"ops without a schema under that name: {undecided}"
    views = {name for name in declared if op_gives_view(name)}
    assert {"view_dtype", "view_as_complex", "permute", "narrow"} <= views
    assert not views & {"mm_out", "addmm_out", "convolution", "copy_", "bmm_out"}
    assert len(views) < 20


def test_the_functions_that_are_known_exist() -> None:
    text = "".join(header.read_text() for header in INCLUDE.rglob("*.h"))
    missing = [name for name in sorted(VIEW_SHIMS | READER_SHIMS) if not re.search(rf"\b{name}\(", text)]
    # item_ of every dtype is declared by name in every version.
    assert not missing, f"torch declares no {missing}"
    assert all(not op_gives_view(name) for name in OPS_OF_OTHER_NAMES)
