"""The pass alone: the same program, with a numbered fetch in front of every use of every weight. Nothing is compiled.

Every case goes through all that may happen to a program before and after the pass: saving and loading, decomposing with
the default table and with none. Outputs, written inputs and states must agree to the bit, run after run.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as map_over
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_map_only

import penstock
from penstock.errors import (
    AlreadyOffloadedError,
    NotAProgramError,
    NoWeightsError,
    TrainingGraphError,
    UnsupportedProgramError,
)
from penstock.export.catalog import build_catalog, state_names
from penstock.export.method import schedule_method
from penstock.export.offload import WEIGHT_KINDS, fetches, mutated_targets
from penstock.export.weightless import make_weightless
from penstock.ops import FETCH
from penstock.program import Method
from tests.export.pass_cases import DTYPES, Net, accumulate, doubled, random_bits, scale_all
from tests.harness import bits
from tests.zoo import Case, decoder, export, quantized

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- what is asked


def reloaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def savable(ep: ExportedProgram) -> bool:
    """Not every version of torch can save and load every program that it exports."""
    try:
        reloaded(ep)
    except Exception:
        return False
    return True


def variants(
    ep: ExportedProgram, offloaded: ExportedProgram, saves: bool
) -> Iterator[tuple[str, ExportedProgram, ExportedProgram]]:
    """(what happened to it, the offloaded program, a program without the pass that computes the same to the bit)."""
    decomposed = ep.run_decompositions()
    yield "offloaded", offloaded, ep
    if saves and savable(ep):
        yield "saved and loaded", reloaded(offloaded), ep
    yield "functionalised again", offloaded.run_decompositions({}), ep
    yield "decomposed", offloaded.run_decompositions(), decomposed
    yield "offloaded after decomposing", penstock.apply_weight_offload(decomposed), decomposed


def kept(value: Any) -> Any:
    """A copy of every tensor: outputs may alias inputs and states, which the next run changes."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def tensors_of(program: ExportedProgram) -> dict[str, Tensor]:
    return {name: t for name, t in {**program.state_dict, **program.constants}.items() if isinstance(t, Tensor)}


def runs(program: ExportedProgram, first: dict[str, Tensor], calls: Any) -> list[Any]:
    """Runs from the first values of the states: outputs, what became of the inputs, and of the states."""
    found = []
    offloaded = bool(fetches(program.graph))
    states = {name: tensor for name, tensor in tensors_of(program).items() if name in first}
    with torch.no_grad():
        for name, tensor in states.items():
            tensor.copy_(first[name])
        module = program.module()
        for call in calls:
            given = copy.deepcopy(call)
            result = module(*given[0], **given[1])
            found.append(kept((result, given, dict(sorted(states.items())))))
            if offloaded:  # outputs are the caller's: what is done to them must not show in the next run
                tree_map_only(Tensor, lambda t: t.zero_() if t.is_contiguous() else t, result)
                for name, tensor in states.items():
                    tensor.copy_(found[-1][2][name])  # eager mode may return a state itself, as torch's programs do
        for name, tensor in states.items():
            tensor.copy_(first[name])
    return found


def assert_same(found: Any, wanted: Any) -> None:
    ours, our_spec = torch.utils._pytree.tree_flatten(found)
    theirs, their_spec = torch.utils._pytree.tree_flatten(wanted)
    assert our_spec == their_spec
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(bits(a.resolve_conj().resolve_neg()), bits(b.resolve_conj().resolve_neg()))
        else:
            assert type(a) is type(b)
            assert a == b


def assert_lent(program: ExportedProgram) -> None:
    """Weights are read by fetches alone, each with its own number and the weight's name; states by none."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    lent = 0
    for spec in program.graph_signature.input_specs:
        if spec.kind not in WEIGHT_KINDS:
            continue
        users = nodes[spec.arg.name].users
        if spec.target in mutated_targets(program):
            assert not any(user.target is FETCH for user in users)
            continue
        assert all(user.target is FETCH for user in users), (spec.target, list(users))
        assert all(user.args[2] == spec.target for user in users)
        lent += len(users)
    numbers = [fetch.args[1] for fetch in fetches(program.graph)]
    assert len(numbers) == lent == len(set(numbers)) > 0


def uses(program: ExportedProgram) -> dict[str, int]:
    return dict(Counter(str(fetch.args[2]) for fetch in fetches(program.graph)))


def check(
    make: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    then: tuple[Any, ...] | None = None,
    strict: bool = False,
    grad: bool = False,
    saves: bool = True,
) -> ExportedProgram:
    """Exported with `args`; run with them, and then with `then` or with the same again."""
    calls = [(args, kwargs or {}), (then or args, kwargs or {})]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(grad)
    ep = torch.export.export(model, args, kwargs, strict=strict)
    graph, signature, tensors = str(ep.graph), str(ep.graph_signature), tensors_of(ep)
    before = kept(tensors)
    offloaded = penstock.apply_weight_offload(ep)
    first = kept({name: tensors[name] for name in mutated_targets(offloaded)})

    wanted = runs(ep, first, calls)
    for what, program, plain in variants(ep, offloaded, saves):
        program.validate()
        assert_lent(program)
        assert_same(runs(program, first, calls), wanted if plain is ep else runs(plain, first, calls))
        assert uses(program).keys() == uses(offloaded).keys(), what
        with pytest.raises(AlreadyOffloadedError):
            penstock.apply_weight_offload(program)
    # One fetch for one consumer, so that no weight is held from one use to the next.
    for fetch in fetches(offloaded.graph):
        assert len(fetch.users) == 1

    assert (str(ep.graph), str(ep.graph_signature)) == (graph, signature)
    after = tensors_of(ep)
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensors[name] for name in tensors)
    assert_same(after, before)
    with torch.no_grad():  # last, because it changes the model's own states
        assert_same(kept(model(*copy.deepcopy(args), **copy.deepcopy(kwargs or {}))), wanted[0][0])
    return offloaded


def schedule(programs: dict[str, ExportedProgram], name: str = "forward") -> Method:
    """What compile would record of a method, without building it."""
    catalog = build_catalog(programs)
    names = {target: known for (method, target), known in catalog.name_of.items() if method == name}
    return schedule_method(name, programs[name], CPU, state_names(programs), names)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------- kinds and uses of weights


def test_every_kind_of_weight_is_lent() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (x @ net.w + net.buffer_b) * net.transient_n - net.constant_c + literal

    def model() -> Net:
        return Net(
            forward,
            w=torch.randn(4, 4),
            buffer_b=torch.randn(4),
            transient_n=torch.randn(4),
            constant_c=torch.randn(4),
            unread=torch.randn(3),
        )

    program = check(model, (X,))
    assert uses(program) == {"w": 1, "buffer_b": 1, "transient_n": 1, "constant_c": 1, "lifted_tensor_0": 1}
    kinds = {spec.target: spec.kind for spec in program.graph_signature.input_specs if spec.target}
    assert kinds["constant_c"] is kinds["lifted_tensor_0"] is InputKind.CONSTANT_TENSOR
    loaded = reloaded(torch.export.export(model(), (X,)))
    assert uses(penstock.apply_weight_offload(loaded)) == uses(program)
    # Nothing is fetched for a parameter that nobody reads, and its value stays with the program.
    assert "unread" in program.state_dict


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_tied_weight_keeps_one_set_of_bytes_under_all_its_names(strict: bool) -> None:
    program = check(Tied, (torch.arange(5),), strict=strict)
    tied = {"embed.weight", "head.weight"}
    assert sum(count for name, count in uses(program).items() if name in tied) == 2
    for variant in (program, reloaded(program), program.run_decompositions(), reloaded(reloaded(program))):
        weights = build_catalog({"forward": variant}).weights.values()
        assert [set(w.names) for w in weights if tied & set(w.names)] == [tied]


def test_one_weight_used_far_apart_is_fetched_anew() -> None:
    torch.manual_seed(0)
    program = penstock.apply_weight_offload(torch.export.export(Tied().eval(), (torch.arange(5),)))
    record = schedule({"forward": program}).schedule
    spans = {a.number: (record.first_step[a.number], record.last_step[a.number]) for a in record.accesses}
    held = {"embed.weight", "head.weight"}
    gather, project = [spans[a.number] for a in record.accesses if a.weight in held]
    # Each use is over with its own step; the layers' steps lie between.
    assert gather == (0, 0)
    assert project == (len(record.steps) - 1,) * 2
    assert project[0] - gather[1] > 3
    assert not any(held & record.live_weights(index) for index in range(1, len(record.steps) - 1))


def test_views_and_parts_of_weights_are_made_anew_for_every_consumer() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        transposed = net.w.t()
        left, right = net.halves.split(2, dim=1)
        first, second = net.chunks.chunk(2)
        rows = net.rows.unbind(0)
        corner = net.nested[1:].transpose(0, 1)[1:3].unsqueeze(0)
        raw = net.typed.view(torch.int32)
        return (
            x @ transposed,
            torch.relu(x) @ transposed,  # the same view again
            x @ left,
            x @ right,
            x[:, :2] @ first,
            x[:, 2:] @ second + rows[3],
            torch.stack(rows[:2]),  # two views in one consumer
            corner * 2,
            corner.sum() + x,
            net.nested.diagonal() * x[0],
            raw + 1,
            (raw >> 3) & 7,
            torch.mm(net.both, net.both.t()),  # a weight and its view in one consumer
            net.both + net.both,  # a weight twice in one consumer
            net.strided.as_strided((2, 2), (1, 4), 2) + 1,
            net.nested[None].expand(2, -1, -1).contiguous(),
            net.nested.reshape(2, 8).sum(0),
        )

    names = ("w", "halves", "chunks", "rows", "nested", "typed", "both", "strided")
    program = check(lambda: Net(forward, **{name: torch.randn(4, 4) for name in names}), (X,))
    assert uses(program) == {
        "w": 2, "halves": 2, "chunks": 2, "rows": 3, "nested": 5, "typed": 2, "both": 3, "strided": 1,
    }  # fmt: skip


def test_layouts() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        return (
            net.last * 2,
            net.transposed @ x,
            net.permuted.flatten(),
            net.gapped @ x,
            net.gapped.t().reshape(-1),
            net.expanded + x,
            net.inside + x,
            net.ones * 2,
            F.conv2d(x.view(1, 1, 4, 4).expand(1, 3, 4, 4), net.last),
        )

    def make() -> Net:
        return Net(
            forward,
            last=torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
            transposed=torch.randn(4, 4).t(),
            permuted=torch.randn(2, 3, 4).permute(2, 0, 1),
            gapped=torch.randn(4, 8)[:, ::2],
            expanded=torch.randn(1, 4).expand(4, 4),
            inside=torch.randn(40)[7:23].view(4, 4),
            ones=torch.randn(12).as_strided((4, 1, 1, 3), (3, 77, 5, 1)),
        )

    program = check(make, (X,))
    after_loading = penstock.apply_weight_offload(reloaded(torch.export.export(make().requires_grad_(False), (X,))))
    for variant in (program, reloaded(program), program.run_decompositions(), after_loading):
        weights = build_catalog({"forward": variant}).weights
        assert {
            n: weights[n].dim_order for n in ("last", "transposed", "permuted", "gapped", "expanded", "inside")
        } == {
            "last": (0, 2, 3, 1),
            "transposed": (1, 0),
            "permuted": (1, 2, 0),
            "gapped": (0, 1),
            "expanded": (0, 1),
            "inside": (0, 1),
        }


@pytest.mark.parametrize(
    ("make", "offset"),
    [
        (lambda: torch.randn(6, 16)[:, ::2], 0),  # gaps
        (lambda: torch.randn(1, 16).expand(6, 16), 0),  # overlaps
        (lambda: torch.randn(100)[7:55].view(6, 8), None),  # reads beyond the end of the weight
        (lambda: torch.randn(100)[7:55].view(6, 8), 7),  # counts from the start of a storage that is not the weight
    ],
    ids=["gaps", "overlaps", "beyond", "offset"],
)
def test_strides_of_a_storage_that_is_not_the_weight_alone_are_refused(
    make: Callable[[], Tensor], offset: int | None
) -> None:
    size = (2, 2) if offset is not None else (7, 8)

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.w[:].as_strided(size, (16, 2) if offset is not None else (8, 1), offset) + x[0, 0]

    ep = torch.export.export(Net(forward, w=make()).requires_grad_(False), (X,))
    with pytest.raises(UnsupportedProgramError, match=r"as_strided.*'w'"):
        penstock.apply_weight_offload(ep)


def test_scalars_and_empty_weights() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        return (
            x * net.scale,
            x * net.scale.item(),
            torch.cat([net.empty, x]),
            net.empty.sum(0),
            net.flat,
            net.buffer_count + 1,
        )

    check(
        lambda: Net(
            forward,
            scale=torch.tensor(1.5),
            empty=torch.randn(0, 4),
            flat=torch.randn(3, 0),
            buffer_count=torch.tensor(3),
        ),
        (X,),
    )


def test_every_dtype_to_the_bit() -> None:
    """Random bytes, NaN payloads among them."""

    def forward(net: Net, x: Tensor) -> list[Tensor]:
        found = []
        for name in DTYPES:
            w = getattr(net, f"buffer_{name}")
            found += [w, w.t().clone() if name in ("float16", "int64", "complex64") else w[x]]
        return found

    def make() -> Net:
        return Net(forward, **{f"buffer_{name}": random_bits(dtype, 3, 8) for name, dtype in DTYPES.items()})

    program = check(make, (torch.tensor([2, 0]),))
    for variant in (program, reloaded(program)) if savable(program) else (program,):
        weights = build_catalog({"forward": variant}).weights
        assert {name: weights[f"buffer_{name}"].dtype for name in DTYPES} == {name: name for name in DTYPES}


def test_lazily_conjugated_and_negated_weights() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.complex(x, x + 1)
        return (
            z @ net.w.conj(),
            net.w.mH,
            net.w.real + 1,
            net.w.imag,
            torch.view_as_real(net.w) * 2,
            net.buffer_conjugated,
            net.buffer_conjugated * z,
            net.buffer_negated + x,
            torch.view_as_complex(net.pairs) * z,
        )

    def make() -> Net:
        negated = torch.randn(4, 4, dtype=torch.complex64).conj().imag
        conjugated = torch.randn(4, 4, dtype=torch.complex64).conj()
        assert negated.is_neg()
        assert conjugated.is_conj()
        return Net(
            forward,
            w=torch.randn(4, 4, dtype=torch.complex64),
            buffer_conjugated=conjugated,
            buffer_negated=negated,
            pairs=torch.randn(4, 4, 2),
        )

    check(make, (X,), saves=False)  # torch.export.save drops the conjugation, with the pass and without


def test_returned_weights_are_copies() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        return net.a, net.a, net.b.t(), net.c.split(2)[0], net.d[1:], net.a + x

    names = ("a", "b", "c", "d")
    program = check(lambda: Net(forward, **{name: torch.randn(4, 4) for name in names}), (X,))
    before = kept(program.state_dict)
    results = program.module()(X)
    storages = {t.untyped_storage().data_ptr() for t in program.state_dict.values()}
    for result in results:
        assert result.untyped_storage().data_ptr() not in storages
        result.fill_(7)
    assert_same(kept(program.state_dict), before)


def test_weights_that_require_grad() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return F.layer_norm(x @ net.w, (4,), net.scale) + net.w.t()[0]

    program = check(lambda: Net(forward, w=torch.randn(4, 4), scale=torch.randn(4)), (X,), grad=True)
    model = Net(forward, w=program.state_dict["w"], scale=program.state_dict["scale"])
    assert torch.equal(program.module()(X), model(X))  # with grad mode on


# --------------------------------------------------------------------------------------------------- quantized weights

SHALLOW = dataclasses.replace(decoder.TINY, layers=1)


@pytest.mark.parametrize("kind", ["int8", "int4", "packed_int4"])
def test_quantized_weights_are_flattened_to_plain_tensors(kind: str) -> None:
    if kind != "packed_int4":
        pytest.importorskip("torchao")
    case = quantized.quantized_methods(kind, SHALLOW)["decode"]
    ep = export(case)
    program = penstock.apply_weight_offload(ep)
    assert_lent(program)
    assert {type(t) for t in tensors_of(program).values()} <= {Tensor, nn.Parameter}
    integers = [
        w for w in build_catalog({"forward": program}).weights.values() if w.dtype in ("int8", "uint8", "int32")
    ]
    assert sum(w.nbytes for w in integers) > 1000
    assert {w.name for w in integers} & set(uses(program))
    for variant in (program, reloaded(program)):
        assert_same(run_case(variant, case), run_case(ep, case))
    assert not fetches(ep.graph)


def run_case(program: ExportedProgram, case: Case) -> Any:
    if isinstance(case.module, decoder.CachedDecoder):
        for name, tensor in tensors_of(program).items():
            if name.endswith("_cache"):
                tensor.zero_()
    with torch.no_grad():
        return kept(program.module()(*case.args))


# --------------------------------------------------------------------------------------------------------------- state


def test_mutated_buffers_and_parameters_are_state() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        old = net.buffer_total.clone()
        net.buffer_total.add_(x)
        net.buffer_cache[:, 1:3] = x[:, :2] @ net.w[:2, :2]  # in place, through a view
        net.transient_seen.index_put_((torch.tensor([1]),), x[:1])
        net.written.mul_(0.5)
        accumulate(x, net.w, net.buffer_custom)
        first = net.buffer_one.clone()
        net.buffer_one.copy_(net.buffer_two)
        net.buffer_two.copy_(first)
        net.buffer_set.copy_(net.w[0])
        return (
            old, net.buffer_total, net.buffer_total.t(), net.buffer_cache.sum(), net.transient_seen.unbind(0)[1],
            net.written @ net.w, net.buffer_custom[1:], net.buffer_one - net.buffer_two, net.read + x,
        )  # fmt: skip

    tensors = ("buffer_total", "buffer_cache", "transient_seen", "written", "buffer_custom", "w", "read")
    vectors = ("buffer_one", "buffer_two", "buffer_set")
    program = check(
        lambda: Net(forward, **{n: torch.randn(4, 4) for n in tensors}, **{n: torch.randn(4) for n in vectors}), (X,)
    )
    assert uses(program).keys() == {"w", "read", "lifted_tensor_0"}
    states = {"buffer_total", "buffer_cache", "transient_seen", "written", "buffer_custom", *vectors}
    assert mutated_targets(program) == states
    for variant in (program, reloaded(program), program.run_decompositions()):
        catalog = build_catalog({"forward": variant})
        assert set(catalog.states) == states
        assert not set(catalog.weights) & states


class TwoNames(nn.Module):
    """One buffer under two names; `name` is the one that the method uses."""

    def __init__(self, buffer: Tensor, w: Tensor, name: str, writes: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(w, requires_grad=False)
        self.register_buffer("a", buffer)
        self.register_buffer("b", buffer)
        self.name, self.writes = name, writes

    def forward(self, x: Tensor) -> Tensor:
        state = getattr(self, self.name)
        if self.writes:
            state.add_(x)
        return state * self.w


def test_a_state_that_another_method_knows_by_another_name_is_refused() -> None:
    """Read under its second name it would be a weight, with the value of the first day."""
    buffer, w = torch.randn(4), torch.randn(4)
    programs = {}
    with pytest.raises(UnsupportedProgramError, match="functionalise|share memory"):
        for method, name, writes in (("write", "a", True), ("read", "b", False)):
            ep = torch.export.export(TwoNames(buffer, w, name, writes), (X[0],))
            programs[method] = penstock.apply_weight_offload(ep)  # torch itself may refuse the first of them
        build_catalog(programs)


def test_a_state_that_a_strict_export_renames_is_refused() -> None:
    buffer, w = torch.randn(4), torch.randn(4)
    programs = {}
    for method, kept_name, writes in (("write", "a", True), ("read", "b", False)):
        ep = torch.export.export(TwoNames(buffer, w, "a", writes), (X[0],), strict=True)
        program = reloaded(penstock.apply_weight_offload(ep))
        for specs in (program.graph_signature.input_specs, program.graph_signature.output_specs):
            for spec in specs:  # strict exports keep one of the names; which one is the exporter's business
                if spec.target in ("a", "b"):
                    spec.target = kept_name
        for fetch in fetches(program.graph):
            if fetch.args[2] in ("a", "b"):
                fetch.args = (*fetch.args[:2], kept_name)
        programs[method] = program
    with pytest.raises(UnsupportedProgramError, match="'b' in method 'read' and 'a' are one buffer"):
        build_catalog(programs)


# -------------------------------------------------------------------------------------------------------- control flow


def test_weights_in_branches_and_loops() -> None:
    def forward(net: Net, x: Tensor, count: Tensor) -> tuple[Any, ...]:
        part, rest = net.split.split(2, dim=1)
        positive = x.sum() > 0
        chosen = torch.cond(positive, lambda v, p: v @ p, lambda v, p: v[:, :2] * p, (x, part)) + rest
        copied = torch.cond(positive, lambda v: net.yes.clone(), lambda v: net.no + v, (x,))

        def more(i: Tensor, value: Tensor) -> Tensor:
            return (i < count) & (net.limit.sum() < 1e9)

        def body(i: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            nested = torch.cond(i > 0, lambda v: v + net.inner, lambda v: v * 2, (value,))
            return i + 1, nested + net.step[0]

        start = torch.zeros((), dtype=torch.int64)
        return chosen, copied, torch.while_loop(more, body, (start, net.carried.unbind(0)[1]))

    names = ("split", "yes", "no", "limit", "step", "carried")
    program = check(
        lambda: Net(forward, inner=torch.randn(4), **{n: torch.randn(4, 4) for n in names}),
        (X.abs(), torch.tensor(0)),
        then=(-X.abs(), torch.tensor(3)),
    )
    weightless = make_weightless(program, CPU, frozenset())
    pinned = Counter(weightless.weight_of[number] for number in weightless.pinned)
    # One half of `split` goes into the branches, the other is read outside. What a loop carries is copied first.
    assert pinned == dict.fromkeys(("split", "yes", "no", "limit", "step", "inner"), 1)
    assert uses(program)["split"] == 2


def test_weights_in_scans_and_maps() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Any, ...]:
        return (
            map_over(lambda v, w: v * w + net.read[0], x, net.extra.split(1)[0][0]),
            map_over(lambda v: v + 1, net.mapped),
            scan(lambda carry, v: (carry * net.body[0] + v, carry + v), net.init.unbind(0)[1], x),
            scan(lambda carry, v: (carry + v, carry * v), x[0], net.scanned),
            associative_scan(lambda a, b: a * b, net.associative, 0, combine_mode="generic") + x,
        )

    names = ("read", "extra", "mapped", "body", "init", "scanned", "associative")
    program = check(lambda: Net(forward, **{n: torch.randn(4, 4) for n in names}), (X,))
    assert uses(program).keys() == set(names)
    weightless = make_weightless(program, CPU, frozenset())
    pinned = {weightless.weight_of[number] for number in weightless.pinned}
    # A generic associative scan is unrolled; an initial value is copied.
    assert pinned == {"read", "extra", "mapped", "body", "scanned"}


def test_what_torch_cannot_functionalise_is_refused_by_name() -> None:
    """A tensor made inside a branch: torch's own run_decompositions fails on it."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v + torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda v: v * net.w, (x,))

    ep = torch.export.export(Net(forward, w=torch.randn(4)).requires_grad_(False), (X,))
    try:
        penstock.apply_weight_offload(ep)
    except UnsupportedProgramError as error:
        assert "run_decompositions" in str(error)  # noqa: PT017  later versions of torch may take it
    else:
        check(lambda: Net(forward, w=torch.randn(4)), (X,))


def test_weights_in_custom_operators() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        fresh, copied = torch.zeros_like(x), net.c.clone()
        accumulate(x, net.a, fresh)
        accumulate(x, net.b.t(), copied)
        part = net.c.clone()
        accumulate(x, net.a[:, :2], part[:, :2])
        return doubled(x, net.a), fresh, copied, part, *scale_all([net.a, net.b.t(), net.c[1:]])

    program = check(lambda: Net(forward, **{n: torch.randn(4, 4) for n in "abc"}), (X,))
    assert uses(program) == {"a": 4, "b": 2, "c": 3}
    weightless = make_weightless(program, CPU, frozenset())
    assert weightless.pinned == frozenset()  # they read on the spot


# ------------------------------------------------------------------------------------------------- inputs and outputs


def test_nested_arguments_and_results() -> None:
    def forward(net: Net, x: Tensor, *, table: Any, listed: Any, flag: bool, nothing: None, count: int) -> Any:
        y = x @ net.w + table["p"]["q"] * count
        return {
            "y": y,
            "again": [y, (y, None, 7, 2.5)],
            "input": x,
            "part": table["p"],
            "flag": flag,
            "w": net.w,
        }

    kwargs = {
        "table": {"p": {"q": torch.randn(4)}},
        "listed": [torch.ones(2), 3],
        "flag": True,
        "nothing": None,
        "count": 5,
    }
    program = check(lambda: Net(forward, w=torch.randn(4, 4)), (X,), kwargs)
    signature = make_weightless(program, CPU, frozenset()).signature
    assert {type(spec).__name__ for spec in signature.inputs} == {"TensorSpec", "ConstantSpec"}
    assert len(signature.inputs) == 7
    assert len(signature.outputs) == 10


def test_mutated_inputs() -> None:
    def forward(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.add_(net.w)
        y[0].copy_(net.w[0])
        return x, x.view(2, 8), y

    check(lambda: Net(forward, w=torch.randn(4, 4)), (torch.randn(4, 4), torch.randn(4, 4)))


def test_regions_of_grad_mode_and_autocast() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            y = x @ net.w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ net.v
        with torch.enable_grad():
            return y, z, x @ net.w

    program = check(lambda: Net(forward, w=torch.randn(4, 4), v=torch.randn(4, 4)), (X,), grad=True)
    assert uses(program) == {"w": 2, "v": 1}
    assert make_weightless(program, CPU, frozenset()).pinned == frozenset()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w) @ self.v


def rows(size: Any) -> ExportedProgram:
    model = Rows().requires_grad_(False)
    return penstock.apply_weight_offload(torch.export.export(model, (torch.randn(6, 4),), dynamic_shapes=({0: size},)))


@pytest.mark.parametrize(
    ("size", "bounds", "most"),
    [
        (Dim("n", min=1, max=64), (1, 64), 64),
        (Dim("n", min=0, max=9), (0, 9), 9),
        (2 * Dim("half", min=2, max=10), (2, 10), 20),
        (Dim("n", min=2), (2, None), None),
        (Dim.AUTO, (2, None), None),
    ],
    ids=["bounded", "from zero", "derived", "unbounded", "auto"],
)
def test_dynamic_sizes_and_their_bounds_are_recorded(size: Any, bounds: tuple[int, Any], most: int | None) -> None:
    program = rows(size)
    method = schedule({"forward": program})
    assert list(method.signature.symbols.values()) == [bounds]
    (symbol,) = method.signature.symbols
    assert symbol in str(method.signature.inputs[0].shape[0])
    assert method.signature.inputs[0].shape[1] == 4
    assert symbol in str(method.signature.outputs[0].shape[0])
    # The product and its relu, which may or may not take its place.
    assert method.activation_example_bytes == 2 * 6 * 8 * 4
    assert method.activation_bound_bytes == (None if most is None else 2 * most * 8 * 4)
    loaded = make_weightless(reloaded(program), CPU, frozenset()).signature
    assert list(loaded.symbols.values()) == [bounds]
    assert torch.equal(program.module()(X), Rows.forward(program.module(), X))


def test_numbers_that_vary_from_call_to_call_are_refused_by_name() -> None:
    class Scaled(Rows):
        def forward(self, x: Tensor, n: int = 1) -> tuple[Any, ...]:
            return x @ self.w * n, x.shape[0], x

    def weightless(args: tuple[Any, ...], shapes: Any) -> None:
        ep = torch.export.export(Scaled(), args, dynamic_shapes=shapes)
        make_weightless(penstock.apply_weight_offload(ep), CPU, frozenset())

    with pytest.raises(UnsupportedProgramError, match="input 'n'.*SymInt"):
        weightless((X, 3), (None, Dim.DYNAMIC))
    with pytest.raises(UnsupportedProgramError, match="output '.*' .*is not a tensor"):
        weightless((X,), ({0: Dim("rows", min=2, max=8)},))


def test_results_that_cannot_be_written_to_a_file_are_refused_by_name() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")

    def forward(net: Net, x: Tensor) -> Any:
        return Pair(x + net.w, x)

    ep = torch.export.export(Net(forward, w=torch.randn(4)), (X,))
    program = penstock.apply_weight_offload(ep)
    with pytest.raises(UnsupportedProgramError, match="outputs.*Pair"):
        make_weightless(program, CPU, frozenset())


def test_effects_are_refused_by_name() -> None:
    """Operators with side effects are threaded on tokens, which are no tensors."""
    effects = pytest.importorskip("torch._higher_order_ops.effects")
    name = "penstock_pass::told"

    @torch.library.custom_op(name, mutates_args=())
    def told(x: Tensor) -> Tensor:
        return x + 1

    told.register_fake(torch.empty_like)
    effects._register_effectful_op(torch.ops.penstock_pass.told.default, effects._EffectType.ORDERED)
    ep = torch.export.export(Net(lambda net, x: told(x) + told(net.w), w=torch.randn(4)).requires_grad_(False), (X,))
    program = penstock.apply_weight_offload(ep)
    assert torch.equal(program.module()(X), X + 1 + (program.state_dict["w"] + 1))
    with pytest.raises(UnsupportedProgramError, match="token"):
        make_weightless(program, CPU, frozenset())


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_program_without_weights_is_refused() -> None:
    with pytest.raises(NoWeightsError, match="never reads: w, buffer_b"):
        penstock.apply_weight_offload(
            torch.export.export(Net(lambda net, x: x + 1, w=torch.randn(4), buffer_b=torch.randn(4)), (X,))
        )

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.buffer_only.add_(x)

    with pytest.raises(NoWeightsError):  # state alone
        penstock.apply_weight_offload(torch.export.export(Net(forward, buffer_only=torch.randn(4, 4)), (X,)))


def test_a_program_of_buffers_alone() -> None:
    check(lambda: Net(lambda net, x: x * net.buffer_a + net.transient_b, buffer_a=X + 1, transient_b=X[0] + 2), (X,))


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(NotAProgramError, match=r"torch.export.export\(model, args\) first"):
        penstock.apply_weight_offload(Rows())  # type: ignore[arg-type]
    with pytest.raises(NotAProgramError, match="NoneType"):
        penstock.apply_weight_offload(None)  # type: ignore[arg-type]


def test_a_program_that_was_exported_again_is_refused_until_it_is_functional() -> None:
    """Fresh from an export, its writes are in place: the state would be taken for a weight, and stay as it was."""

    def forward(net: Net, x: Tensor) -> Tensor:
        net.buffer_total.add_(x @ net.w)
        return net.buffer_total * 2

    model = Net(forward, w=torch.randn(4, 4), buffer_total=torch.zeros(4, 4)).requires_grad_(False)
    program = penstock.apply_weight_offload(torch.export.export(model, (X,)))
    again = torch.export.export(program.module(), (X,))
    with pytest.raises(AlreadyOffloadedError):
        penstock.apply_weight_offload(again)
    with pytest.raises(UnsupportedProgramError, match="in place.*run_decompositions"):
        make_weightless(again, CPU, frozenset())
    functional = again.run_decompositions({})
    assert make_weightless(functional, CPU, frozenset({"buffer_total"})).states == ("buffer_total",)
    assert set(build_catalog({"forward": functional}).states) == {"buffer_total"}


def test_a_fetch_of_something_else_than_a_weight_is_refused() -> None:
    program = rows(Dim("n", min=2, max=8))
    fetch = fetches(program.graph)[0]
    with program.graph.inserting_before(fetch):
        between = program.graph.call_function(torch.ops.aten.neg.default, (fetch.args[0],))
        between.meta = dict(fetch.args[0].meta)  # type: ignore[union-attr]
    fetch.args = (between, *fetch.args[1:])
    with pytest.raises(UnsupportedProgramError, match=r"accesses \[\d\] fetch something other than a weight"):
        make_weightless(program, CPU, frozenset())


class Trains(nn.Module):
    def __init__(self, layer: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.layer = nn.Linear(4, 4), layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.linear(x))


TRAINING: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Dropout(0.5), (2, 4)),
    "dropout in place": (lambda: nn.Dropout(0.5, inplace=True), (2, 4)),
    "dropout2d": (lambda: nn.Dropout2d(0.5), (2, 3, 4, 4)),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.5), (2, 4)),
    "feature_alpha_dropout": (lambda: nn.FeatureAlphaDropout(0.5), (2, 3, 4, 4)),
    "batch_norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4)),
    "attention": (lambda: lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), (2, 3, 4)),
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.5), (3, 2, 4)),
    "rrelu": (lambda: nn.RReLU(), (2, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8), (3, 2, 4)),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_mode_is_refused(name: str) -> None:
    make, shape = TRAINING[name]
    ep = torch.export.export(Trains(make()).train(), (torch.randn(shape),))
    with pytest.raises(TrainingGraphError, match=r"training mode; call model.eval\(\)"):
        penstock.apply_weight_offload(ep)


def test_training_mode_inside_a_region_is_refused() -> None:
    class Inside(Trains):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.layer(self.linear(x))
            return y * 2

    with torch.enable_grad():
        ep = torch.export.export(Inside(nn.Dropout(0.5)).train(), (torch.randn(2, 4),))
    with pytest.raises(TrainingGraphError, match="dropout"):
        penstock.apply_weight_offload(ep)


def test_gradients_are_refused() -> None:
    experimental = pytest.importorskip("torch.export.experimental")
    ep = torch.export.export(Trains(lambda x: x.sum()), (torch.randn(2, 4),))
    joint = experimental._export_forward_backward(ep)
    with pytest.raises(TrainingGraphError, match="loss output.*Export the forward pass alone"):
        penstock.apply_weight_offload(joint)


class Evaluated(nn.Module):
    """Every layer that is refused in training mode, and norms that take statistics of the batch in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ModuleList((nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.AlphaDropout(0.5), nn.RReLU()))
        self.images = nn.ModuleList(
            (
                nn.Dropout2d(0.5),
                nn.FeatureAlphaDropout(0.5),
                nn.BatchNorm2d(3),
                nn.BatchNorm2d(3, track_running_stats=False),
                nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
                nn.InstanceNorm2d(3, affine=True),
            )
        )
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)

    def forward(self, image: Tensor) -> Tensor:
        for layer in (*self.images, *self.flat):
            image = layer(image)
        return self.attention(image[0], image[0], image[0])[0]


def test_eval_mode_is_not_refused() -> None:
    check(Evaluated, (torch.randn(2, 3, 4, 4),))
    lstm = nn.LSTM(4, 4, 2, dropout=0.5).eval()
    assert_lent(penstock.apply_weight_offload(torch.export.export(lstm, (torch.randn(3, 2, 4),))))


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.0), nn.LSTM(4, 4, 2, dropout=0.0), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_training_mode_that_changes_nothing_is_not_refused(layer: nn.Module) -> None:
    """The mode is no part of an exported program: what counts is what its operators do."""
    ep = torch.export.export(Trains(layer).train(), (torch.randn(3, 4),))
    assert_lent(penstock.apply_weight_offload(ep))
