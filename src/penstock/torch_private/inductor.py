"""Inductor: gives the ops their lowerings, turns the scheduler's final nodes into plain data, puts them into the
derived order right before emission, and makes the compiled files.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from penstock.ops import FORBID_REINPLACE, FORCE_CLONE, GROUPED, LINEAR, MATERIALIZE, ROWS, WEIGHT
from penstock.torch_private.emission import Buffer, Emission, EmissionOrder, EmittedNode
from penstock.torch_private.graph import finite_bound, memory_of, op_name
from penstock.torch_private.versions import check_torch_version
from penstock.torch_private.wrapper_text import FETCH, STEP_END

try:
    from torch._inductor import config as inductor_config
    from torch._inductor import cpu_vec_isa, ir
    from torch._inductor.lowering import clone as lower_clone
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
    from torch._inductor.virtualized import V
    from torch.export.pt2_archive._package import package_pt2
    from torchgen.aoti.fallback_ops import inductor_fallback_ops  # type: ignore[import-untyped]
except ImportError:
    # Something moved. If this torch was not tested, give that as the reason.
    check_torch_version(str(torch.__version__))
    raise

MAIN_GRAPH = "main"

# --------------------------------------------------------------------------------------------------------- lowerings

_lower_weight_call = fallback_handler(WEIGHT, add_to_fallback_set=False)


@register_lowering(WEIGHT, type_promotion_kind=None)
def _lower_weight(*args: Any) -> Any:
    result = _lower_weight_call(*args)
    # The compiler takes a custom op's result for a fresh buffer and would reuse it as scratch.
    V.graph.never_reuse_buffers.add(result.get_name())
    return result


for _op in (LINEAR, ROWS, GROUPED):
    register_lowering(_op, type_promotion_kind=None)(fallback_handler(_op, add_to_fallback_set=False))


_lower_clone_call = fallback_handler(torch.ops.aten.clone.default, add_to_fallback_set=False)


@register_lowering(FORCE_CLONE, type_promotion_kind=None)
def _lower_force_clone(value: Any) -> Any:
    if value.get_dtype().is_complex:
        # Only torch's own clone knows whether the value is lazily conjugated; generated code would copy the bare bytes.
        return _lower_clone_call(value)
    result = lower_clone(value)
    # Realized at once: a lazy copy could be folded into its reader, and the output would be the weight again.
    result.realize()
    return result


@register_lowering(MATERIALIZE, type_promotion_kind=None)
def _lower_materialize(value: Any) -> Any:
    value.realize()
    return value


@register_lowering(FORBID_REINPLACE, type_promotion_kind=None)
def _lower_forbid_reinplace(lent: Any) -> None:
    return None


has_side_effect(FORBID_REINPLACE)


# Ops whose lowerings keep an argument (a group size, say) as a constant tensor of the program. A weightless program
# holds no constants at all: that is how a folded weight is noticed. So these ops are called as they are.
_CALLED_AS_THEY_ARE = [
    overload
    for name in ("_weight_int4pack_mm_for_cpu",)
    if (overload := getattr(getattr(torch.ops.aten, name, None), "default", None)) is not None
]


@contextlib.contextmanager
def _plain_calls() -> Iterator[None]:
    """Replaces those lowerings during one compilation: other users of the process keep theirs."""
    before = {op: lowerings[op] for op in _CALLED_AS_THEY_ARE if op in lowerings}
    lowerings.update((op, fallback_handler(op, add_to_fallback_set=False)) for op in before)
    try:
        yield
    finally:
        lowerings.update(before)


@contextlib.contextmanager
def _without_cpu_vectors(device: torch.device) -> Iterator[None]:
    """A GPU target does not need the host's vector instructions. To find out which of them the compiler knows, Inductor
    builds and loads ten small libraries, one after the other: more than a third of a first compilation on 16 cores.
    """
    if device.type == "cpu":
        yield
        return
    before = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = _no_vectors  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = before


def _no_vectors() -> list[cpu_vec_isa.VecISA]:
    return []


_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """torch 2.11 lowers grouped products to calls of a C function that it does not have. There, the compiled code asks
    for the operator by its name instead."""
    if str(_GROUPED_PRODUCT) in inductor_fallback_ops:
        yield
        return
    before = lowerings[_GROUPED_PRODUCT]
    lowerings[_GROUPED_PRODUCT] = fallback_handler(_GROUPED_PRODUCT, add_to_fallback_set=False)
    try:
        yield
    finally:
        lowerings[_GROUPED_PRODUCT] = before


# Ops that later passes turn into writes into their first input.
_WRITTEN_IN_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
        "as_strided_scatter",
        "index_put",
        "_unsafe_index_put",
    )
)


class GuardLentWeights:
    """The last graph pass: outputs that alias a lent weight or a written input become copies, and no later pass may
    write into a weight.

    It runs after no-ops were removed, which also removes a user's own clone of a weight, or of the value that a state
    takes. It runs before reinplacing, which would write into anything that is not an input and has no later use: hence
    the late FORBID_REINPLACE.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        lent = graph.find_nodes(op="call_function", target=WEIGHT)
        # Inputs are written at the very end, by copies of their new values.
        writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {memory_of(node) for write in writes for node in write.args[:2]}
        output = graph.output_node()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}

        def copy_of(value: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
            if value not in copies:
                with graph.inserting_before(before):
                    copies[value] = graph.call_function(FORCE_CLONE, (value,))
                copies[value].meta["val"] = FORCE_CLONE(value.meta["val"])
            return copies[value]

        def owned(value: Any) -> Any:
            if not isinstance(value, torch.fx.Node):
                return value
            memory = memory_of(value)
            if memory in written:
                return copy_of(value, writes[0])
            return copy_of(value, output) if memory.target is WEIGHT else value

        output.args = torch.fx.map_arg(output.args, owned)
        overwritten: set[torch.fx.Node] = set()
        for write in writes:
            target, value = write.args[:2]
            overwritten.add(memory_of(target))
            # Two states swap places, or a state becomes its own transpose: the clone in between was dropped as a no-op.
            if value is not target and memory_of(value) in overwritten:
                write.args = (target, copy_of(value, writes[0]), *write.args[2:])
        for node in list(graph.nodes):
            # The same within one state: a window that slides by one, written in place, would read what it just wrote.
            if op_name(node.target) in _WRITTEN_IN_PLACE and memory_of(node.args[0]).target is not WEIGHT:
                for value in node.all_input_nodes:
                    if value is not node.args[0] and memory_of(value) is memory_of(node.args[0]):
                        with graph.inserting_before(node):
                            copy = graph.call_function(FORCE_CLONE, (value,))
                        copy.meta["val"] = FORCE_CLONE(value.meta["val"])
                        node.replace_input_with(value, copy)
        if lent:
            with graph.inserting_before(output):
                graph.call_function(FORBID_REINPLACE, (lent,))

    def uuid(self) -> None:
        """None: never cache by this pass."""


# ---------------------------------------------------------------------------------------------------------- emission


def _access_number(node: BaseSchedulerNode) -> int | None:
    kernel: Any = node.node
    if kernel is None or getattr(kernel, "op_overload", None) is not WEIGHT:
        return None
    return int(kernel.constant_args[0])


def _kernel_name(node: BaseSchedulerNode) -> str:
    kernels = [n.node for n in node.get_nodes() if n.node is not None]
    names: list[str] = []
    for kernel in kernels:
        called = getattr(kernel, "python_kernel_name", None)
        names.append(called if isinstance(called, str) and called else type(kernel).__name__)
    if len(kernels) == 1 and names[0] not in ("ComputedBuffer", "SchedulerNode"):
        return names[0]
    origins = sorted({o.name for kernel in kernels for o in getattr(kernel, "origins", ())})
    return "fused(" + ", ".join(origins[:6]) + (", ...)" if len(origins) > 6 else ")")


def _asynchronous(node: BaseSchedulerNode) -> bool:
    kinds = {type(n.node).__name__ for n in node.get_nodes()}
    if kinds & {"_CollectiveKernel", "_AllReduceKernel", "_AllReduce_Kernel", "_WaitKernel"}:
        return True
    streams = getattr(node.scheduler, "node_to_stream", {})  # only where torch has user streams
    return any(streams.get(n, 0) for n in (node, *node.get_nodes()))


def _buffer(name: str, buffer: Any) -> Buffer | None:
    """The memory that a scheduler buffer takes; None where it takes none of its own."""
    kernel = buffer.node
    layout: Any = getattr(kernel, "layout", None)
    no_memory = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE, ir.NonOwningLayout)
    if not isinstance(layout, ir.Layout) or isinstance(layout, no_memory):
        return None
    if buffer.get_aliases() or buffer.get_mutations():
        return None
    nbytes = layout.storage_size() * layout.dtype.itemsize
    return Buffer(name, _size_hint(nbytes), _size_bound(nbytes))


def _size_hint(expression: Any) -> int:
    sizevars: Any = V.graph.sizevars
    # Renamed between the supported versions of torch.
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    try:
        return int(hint(expression, fallback=0))
    except TypeError:
        return int(hint(expression))


def _size_bound(expression: Any) -> int | None:
    if isinstance(expression, int) or expression.is_number:
        return int(expression)
    return finite_bound(expression, V.graph.sizevars.shape_env.var_to_range)


def _emitted(node: BaseSchedulerNode, real: dict[str, str]) -> EmittedNode:
    outputs = [output for part in node.get_nodes() for output in part.get_outputs()]
    outputs += [output for output in node.get_outputs() if output not in outputs]
    named = [(output.get_name(), output) for output in outputs]
    unpacks = tuple(dep.name for dep in node.read_writes.reads) if isinstance(node.node, ir.MultiOutput) else ()
    return EmittedNode(
        name=node.get_name(),
        kernel=_kernel_name(node),
        buffers=tuple(
            found
            for name, output in named
            if name not in V.graph.removed_buffers and (found := _buffer(name, output)) is not None
        ),
        defines=tuple(name for name, _ in named),
        uses=frozenset(real.get(name, name) for name in node.used_or_aliased_buffer_names()),
        mutates=tuple(real.get(name, name) for _, output in named for name in output.get_mutations()),
        fetch=_access_number(node),
        unpacks=unpacks,
        asynchronous=_asynchronous(node),
    )


def _emission(scheduler: Scheduler) -> Emission:
    real = scheduler.mutation_real_name
    aliases = {
        name: tuple(real.get(other, other) for other in buffer.get_aliases())
        for name, buffer in scheduler.name_to_buf.items()
    }
    aliases.update((name, (real[name], *aliases.get(name, ()))) for name in real)
    constants = getattr(V.graph, "is_const_graph", False)
    return Emission(
        graph=V.graph.name or ("constants" if constants else MAIN_GRAPH),
        nodes=tuple(_emitted(node, real) for node in scheduler.nodes),
        outputs=tuple(V.graph.get_output_names()),
        aliases=aliases,
    )


def _hold_carried(scheduler: Scheduler) -> None:
    """A loop that makes no trip returns the very buffers it was given, but the compiler considers them free again."""
    for node in scheduler.nodes:
        for carried in getattr(node.node, "carried_inputs", None) or ():
            V.graph.never_reuse_buffers.add(carried.get_name())


_patch_lock = threading.Lock()


@contextlib.contextmanager
def scheduled(plan: Callable[[Emission], EmissionOrder | None]) -> Iterator[None]:
    """While this is active, every graph's final nodes go through `plan`, which may give a derived order.

    `Scheduler.codegen` is the last point before emission: every pass that reorders has run. The compiler also writes a
    call after each step, so that a session knows its true end.
    """
    with _patch_lock:
        codegen, enter_context = Scheduler.codegen, Scheduler.enter_context

        def codegen_in_order(self: Scheduler) -> None:
            _hold_carried(self)
            order = plan(_emission(self))
            if order is None:
                codegen(self)
                return
            nodes = list(self.nodes)
            self.nodes = [nodes[index] for index in order.order]
            step_of = {id(nodes[index]): step for step, index in enumerate(order.step_nodes)}
            ended: list[int] = []

            def write_ends() -> None:
                for step in ended:
                    V.graph.wrapper_code.writeline(f"{STEP_END}({step}L);")
                ended.clear()

            def enter(scheduler: Scheduler, node: BaseSchedulerNode) -> Any:
                if scheduler is self:
                    if ended:
                        scheduler.flush()  # the C++ backend collects loops into one kernel until told otherwise
                        write_ends()
                    if id(node) in step_of:
                        ended.append(step_of[id(node)])
                return enter_context(scheduler, node)

            Scheduler.enter_context = enter  # type: ignore[method-assign, assignment]
            try:
                codegen(self)
            finally:
                Scheduler.enter_context = enter_context  # type: ignore[method-assign]
            write_ends()

        Scheduler.codegen = codegen_in_order  # type: ignore[method-assign]
        try:
            yield
        finally:
            Scheduler.codegen = codegen  # type: ignore[method-assign]
            Scheduler.enter_context = enter_context  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------- compilation

# Set by us, not to be overridden: with another value the program would not be what its record says.
REQUIRED_OPTIONS = (
    "cpp_wrapper",
    "freezing",
    "aot_inductor.package",
    "aot_inductor.package_constants_in_so",
    "aot_inductor.use_runtime_constant_folding",
    "aot_inductor.custom_ops_to_c_shims",
    "aot_inductor.output_path",
    "post_grad_custom_post_pass",
    "triton.cudagraphs",
)


# Arguments of the C functions that our readers of weights become.
_SHIM_ARGUMENTS = {
    # Bias is a pointer to a handle, null where there is none.
    LINEAR: "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, int64_t, AtenTensorHandle*",
    ROWS: "AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*",
    GROUPED: "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int32_t, int64_t, AtenTensorHandle*",
}


def _c_shims(device: torch.device, readers: Sequence[Any]) -> dict[Any, list[str]]:
    prefix = f"AOTITorchError aoti_torch_{device.type}"
    weight = f"{prefix}_{FETCH}(int64_t, const int64_t*, int64_t, int32_t, int32_t, int32_t, AtenTensorHandle*)"
    shims: dict[Any, list[str]] = {WEIGHT: [weight, f"void {STEP_END}(int64_t)"]}
    for op in readers:
        shims[op] = [f"{prefix}_{op._opname}({_SHIM_ARGUMENTS[op]})"]
    return shims


def _options(device: torch.device, output_folder: str, readers: Sequence[Any]) -> dict[str, Any]:
    return {
        "freezing": False,
        "aot_inductor.package": True,
        "aot_inductor.use_runtime_constant_folding": False,
        # A folder, not a file: the loader finds what custom ops need by the name that the compiler gives the library.
        "aot_inductor.output_path": output_folder,
        "aot_inductor.custom_ops_to_c_shims": _c_shims(device, readers),
        "post_grad_custom_post_pass": GuardLentWeights(),
        # Padding would copy a misaligned weight on every call, outside of the budget.
        "shape_padding": False,
        # torch 2.11: ints scattered into zeros of floats become an int64 tensor (the routers of DeepSeek-V3 do so).
        "optimize_scatter_upon_const_tensor": False,
        # These tables, for profilers, are a third of a small program's library. torch 2.11 lacks them and the option.
        **{name: False for name in ("aot_inductor.enable_line_tables",) if known_option(name)},
    }


def known_option(name: str) -> bool:
    """Whether torch._inductor.config has such an option."""
    return name in inductor_config.get_config_copy()


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
    output_folder: str,
    options: dict[str, Any],
) -> list[str]:
    """Compile with AOTInductor; gives the files of the package. `inputs` are fake: no data is touched."""
    readers = [op for op in _SHIM_ARGUMENTS if module.graph.find_nodes(op="call_function", target=op)]
    merged = {**_options(device, output_folder, readers), **options}
    with torch.no_grad(), _plain_calls(), _without_cpu_vectors(device), _grouped_products():
        files = torch._inductor.aot_compile(module, tuple(inputs), options=merged)
    listed = files if isinstance(files, list) else []
    names = [file for file in listed if isinstance(file, str)]
    if not names or len(names) != len(listed):
        raise TypeError(f"AOTInductor gave {files!r} where a list of file names was expected")
    return names


def pack_archive(files: Mapping[str, Sequence[str]], extra: Mapping[str, str]) -> bytes:
    """A .pt2 archive of the compiled methods' files and some text files."""
    buffer = io.BytesIO()
    package_pt2(
        buffer,
        aoti_files={method: list(paths) for method, paths in files.items()},
        extra_files=dict(extra),
    )
    return buffer.getvalue()
