"""Every private interface of torch that penstock.torch_private leans on. A failure here names the one that moved."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from penstock.torch_private import graph, pytree

SCHEDULER_METHODS = ("codegen", "enter_context", "flush")
NODE_METHODS = ("used_or_aliased_buffer_names", "get_nodes", "get_outputs", "get_name", "get_buffer_names")


@pytest.mark.parametrize("name", SCHEDULER_METHODS)
def test_scheduler_method(name: str) -> None:
    from torch._inductor.scheduler import Scheduler

    assert callable(getattr(Scheduler, name, None)), f"torch._inductor.scheduler.Scheduler.{name} is gone"


def test_scheduler_hooks_keep_their_arguments() -> None:
    from torch._inductor.scheduler import Scheduler

    assert list(inspect.signature(Scheduler.codegen).parameters) == ["self"]
    assert list(inspect.signature(Scheduler.enter_context).parameters) == ["self", "node"]


def test_codegen_is_the_last_point_before_emission() -> None:
    """It hands its nodes straight to emission; a pass that reorders after it would undo the placement."""
    from torch._inductor.scheduler import Scheduler

    source = inspect.getsource(Scheduler.codegen)
    assert "_codegen" in source
    assert "reorder" not in source
    assert "self.enter_context(node)" in inspect.getsource(Scheduler._codegen)


@pytest.mark.parametrize("name", NODE_METHODS)
def test_scheduler_node_method(name: str) -> None:
    from torch._inductor.scheduler import BaseSchedulerNode

    assert callable(getattr(BaseSchedulerNode, name, None)), f"BaseSchedulerNode.{name} is gone"


@pytest.mark.parametrize("name", ["get_aliases", "get_mutations", "get_name"])
def test_scheduler_buffer_method(name: str) -> None:
    from torch._inductor.scheduler import SchedulerBuffer

    assert callable(getattr(SchedulerBuffer, name, None)), f"SchedulerBuffer.{name} is gone"


@pytest.mark.parametrize(
    "name", ["NoneLayout", "MultiOutputLayout", "MutationLayoutSHOULDREMOVE", "NonOwningLayout", "MultiOutput"]
)
def test_ir_class(name: str) -> None:
    from torch._inductor import ir

    assert inspect.isclass(getattr(ir, name, None)), f"torch._inductor.ir.{name} is gone"


def test_graph_lowering_keeps_never_reuse_buffers() -> None:
    from torch._inductor.graph import GraphLowering

    source = inspect.getsource(GraphLowering.__init__)
    for name in ("never_reuse_buffers", "removed_buffers"):
        assert f"self.{name}" in source, f"GraphLowering.{name} is gone"


def test_post_pass_runs_between_noop_removal_and_reinplacing() -> None:
    """The guard's place: after no-ops were removed, before anything is written in place."""
    from torch._inductor.fx_passes import post_grad

    source = inspect.getsource(post_grad.post_grad_passes)
    noop, guard, inplace = (
        source.index("remove_noop_ops"),
        source.index("config.post_grad_custom_post_pass"),
        source.index("reinplace_inplaceable_ops"),
    )
    assert noop < guard < inplace


def test_options_exist() -> None:
    from penstock.torch_private.inductor import _SHIM_ARGUMENTS, REQUIRED_OPTIONS, _options, known_option

    names = set(REQUIRED_OPTIONS) | set(_options(torch.device("cpu"), "folder", list(_SHIM_ARGUMENTS)))
    missing = [name for name in sorted(names) if not known_option(name)]
    assert not missing, f"torch._inductor.config lacks {missing}"
    assert not known_option("no_such_option")
    assert not known_option("aot_inductor.no_such_option")


def test_wrapper_names_still_match() -> None:
    """The text check leans on these: the class of the model base and the name of its run function."""
    from torch._inductor.codegen import cpp_wrapper_cpu

    source = inspect.getsource(cpp_wrapper_cpu)
    for text in ("AOTInductorModelBase(", "run_impl", "num_constants", "RAIIAtenTensorHandle"):
        assert text in source, f"the C++ wrapper no longer writes {text!r}"


def test_pytree_specs_round_trip() -> None:
    from penstock.torch_private.pytree import flatten, unflatten

    leaves, spec = flatten(({"a": 1, "b": [2, 3]},), {"k": (4,)})
    assert leaves == [1, 2, 3, 4]
    assert unflatten([10, 20, 30, 40], spec) == (({"a": 10, "b": [20, 30]},), {"k": (40,)})


def test_storage_key_tells_memory_apart_on_meta_too() -> None:
    from penstock.torch_private.graph import storage_key

    for device in ("cpu", "meta"):
        a = torch.empty(4, device=device)
        assert storage_key(a) == storage_key(a.view(2, 2))
        b = torch.empty(4, device=device)
        assert storage_key(a) != storage_key(b)


def test_bounds_of_sizes() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x]) + 1

    for most, expected in ((9, 18), (None, None)):
        rows = torch.export.Dim("rows", min=2, max=most)
        ep = torch.export.export(Doubled(), (torch.zeros(3, 4),), dynamic_shapes=({0: rows},))
        result = next(node for node in reversed(ep.graph.nodes) if node.op == "call_function").meta["val"]
        bounds = [graph.size_bound(size, ep.range_constraints) for size in result.shape]
        assert bounds == [expected, 4]


def test_schema_questions() -> None:
    from penstock.torch_private.graph import gives_view, higher_order_name, namespace, op_name

    aten = torch.ops.aten
    assert op_name(aten.linear.default) == "aten::linear"
    assert op_name(len) is None
    assert gives_view(aten.t.default)
    assert gives_view(aten.split.Tensor)
    assert not gives_view(aten.mm.default)
    assert not gives_view(aten.add_.Tensor)
    assert higher_order_name(torch.ops.higher_order.cond) == "cond"
    assert higher_order_name(aten.mm.default) is None
    assert namespace(torch.ops._c10d_functional.wait_tensor.default) == "_c10d_functional"


def test_package_loader_still_takes_what_we_pass() -> None:
    loader = torch._C._aoti.AOTIModelPackageLoader
    # A function of the C++ side: its signature stands in its doc.
    assert loader.__init__.__doc__ is not None
    assert loader.__init__.__doc__.replace(" ", "").count("arg") == 5
    assert callable(loader.run) and callable(loader.get_constant_fqns)


def test_package_pt2_still_takes_what_we_pass() -> None:
    from torch.export.pt2_archive._package import package_pt2

    assert {"aoti_files", "extra_files"} <= set(inspect.signature(package_pt2).parameters)


def test_specs_are_dumped_in_the_form_that_program_files_have() -> None:
    """Program files hold this text, and are read without torch."""
    leaf = {"type": None, "context": None, "children_spec": []}
    _, spec = pytree.flatten((1, [2], (3,)), {"b": 4, "a": 5})
    assert json.loads(spec) == [
        1,
        {
            "type": "builtins.tuple",
            "context": "null",
            "children_spec": [
                {
                    "type": "builtins.tuple",
                    "context": "null",
                    "children_spec": [
                        leaf,
                        {"type": "builtins.list", "context": "null", "children_spec": [leaf]},
                        {"type": "builtins.tuple", "context": "null", "children_spec": [leaf]},
                    ],
                },
                {"type": "builtins.dict", "context": '["b", "a"]', "children_spec": [leaf, leaf]},
            ],
        },
    ]


def test_tensors_of_a_nesting() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    tree = {"x": [a, 1], "y": (b,)}
    assert pytree.leaves_of(tree)[1] == 1 and pytree.leaves_of(tree)[0] is a
    doubled = pytree.with_tensors(tree, lambda tensor: tensor * 2)
    assert doubled["x"][1] == 1 and torch.equal(doubled["x"][0], a * 2) and isinstance(doubled["y"], tuple)


def test_a_flat_module_says_so() -> None:
    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    pytree.make_flat(module, 3, 2)
    assert module._in_spec.num_leaves == 3 and module._out_spec.num_leaves == 2


def test_overload_names() -> None:
    assert graph.overload_name(torch.ops.aten.add.Tensor) == "Tensor"
    assert graph.overload_name(torch.ops.aten.mm.default) == "default"


def test_schemas_can_be_listed() -> None:
    schemas = {(schema.name, schema.overload_name): schema for schema in torch._C._jit_get_all_schemas()}
    assert schemas["aten::view", "dtype"].returns[0].alias_info is not None
    assert schemas["aten::mm", ""].returns[0].alias_info is None


def test_compiled_files_have_the_names_that_we_look_for() -> None:
    """The wrapper's text is taken from the file of this name, and from this folder of an archive."""
    from torch._inductor import codecache
    from torch.export.pt2_archive import constants

    assert '"wrapper.cpp"' in inspect.getsource(codecache)
    assert constants.AOTINDUCTOR_DIR == "data/aotinductor/"


def test_a_program_for_a_gpu_asks_for_no_vectors_of_the_cpu() -> None:
    from torch._inductor import cpu_vec_isa

    from penstock.torch_private.inductor import _without_cpu_vectors

    before = cpu_vec_isa.valid_vec_isa_list
    with _without_cpu_vectors(torch.device("cuda")):
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    with pytest.raises(ValueError), _without_cpu_vectors(torch.device("cuda")):
        raise ValueError
    # Others who compile for the CPU in this process keep theirs.
    assert cpu_vec_isa.valid_vec_isa_list is before
    with _without_cpu_vectors(torch.device("cpu")):
        assert cpu_vec_isa.valid_vec_isa_list is before
