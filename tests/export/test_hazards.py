"""What compiled code may do to a lent weight. One test for each way that was seen or read in the compiler's sources.

Every model here runs under poison: a weight that is written into, read after its recorded last reader, or returned,
fails the run. So these tests assert more than their last lines say.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ScheduleError, UnsupportedProgramError, WeightEscapesError, WeightWrittenError
from penstock.export.derive import derive
from penstock.export.weightless import make_weightless
from penstock.torch_private.emission import Buffer, Emission, EmittedNode
from tests.harness import compiled, exact_floor_bytes, offloaded, poisoned, schedule_weights


class Writes(nn.Module):
    """Writes into values that come from weights, behind the user's own clones, in every way that is reinplaced."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("put", "add", "accumulate", "scatter", "fill", "slice", "copy"):
            self.register_parameter(name, nn.Parameter(torch.randn(6, 4)))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        put = self.put.clone()
        put[index] = x
        add = self.add.clone().index_add_(0, index, x)
        accumulate = self.accumulate.clone().index_put_((index,), x, accumulate=True)
        scatter = self.scatter.clone().scatter_(0, index[:, None].expand(-1, 4), x)
        fill = self.fill.clone().index_fill_(0, index, 3.0)
        sliced = self.slice.clone()
        sliced[:2] = x
        copied = self.copy.index_copy(0, index, x)
        return put, add, accumulate, scatter, fill, sliced, copied


def test_1_reinplacing_does_not_write_into_weights(tmp_path: Path) -> None:
    poisoned(tmp_path, Writes(), (torch.randn(2, 4), torch.tensor([1, 4])))


@torch.library.custom_op("penstock_tests::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@bump.register_fake
def _(x: torch.Tensor) -> None:
    return None


class CustomWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w.clone()
        bump(y)
        return x @ y


def test_1_custom_op_that_mutates_gets_a_copy(tmp_path: Path) -> None:
    poisoned(tmp_path, CustomWrite(), (torch.randn(2, 4),))


def test_1_backstop_refuses_a_node_that_writes_into_a_fetch() -> None:
    with pytest.raises(WeightWrittenError, match=r"index_put.*accesses \[3\]"):
        derive(emission(node("mutation", uses={"buf1"}, mutates=("buf1",), kernel="aten.index_put_")))


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcdefghijk":
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.a,
            self.b.t(),
            self.c[1:3],
            self.d.view(2, 8),
            self.e[0].expand(3, 4),
            torch.as_strided(self.f, (2, 2), (4, 1), 1),
            self.drop(self.g),
            self.h.contiguous(),
            self.i.to(torch.float32),
            torch.cat([self.j]),
            self.k.clone(),
            x + self.a,
        )


def test_2_outputs_never_alias_weights(tmp_path: Path) -> None:
    poisoned(tmp_path, Returns(), (torch.randn(4, 4),))


def test_2_backstop_refuses_an_output_that_aliases_a_fetch() -> None:
    with pytest.raises(WeightEscapesError, match="access 3"):
        derive(emission(outputs=("view",), aliases={"view": ("other",), "other": ("buf1",)}))


class Loop(nn.Module):
    """Carries a weight through a loop that may make no trip; another weight is read by the body."""

    def __init__(self) -> None:
        super().__init__()
        self.carried = nn.Parameter(torch.randn(4, 4))
        self.step = nn.Parameter(torch.randn(4, 4))

    def forward(self, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def more(i: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return i < count

        def body(i: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, value + self.step

        i, value = torch.while_loop(more, body, (torch.zeros((), dtype=torch.int64), self.carried))
        return i, value


def test_3_loop_without_a_trip_does_not_return_the_weight(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Loop(), (torch.tensor(0),))
    value = module(torch.tensor(3))[1]
    reference = Loop()
    weights = {w.name: w for w in module.program.weights}
    assert set(weights) == {"carried", "step"}
    assert value.shape == reference.carried.shape
    # The body's weight cannot be followed and stays in place; the carried one is copied and free again.
    accesses = module.program.methods[0].schedule.accesses
    assert {a.weight: a.pinned for a in accesses} == {"carried": False, "step": True}


class Complex(nn.Module):
    """A view made by a fallback op, used late: the weight's life does not end with the view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, 2))
        self.m = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.w)
        y = torch.relu(x @ self.m)
        for _ in range(3):
            y = torch.relu(y @ y)
        return torch.view_as_real(y.to(torch.complex64) @ z)


def test_4_views_by_fallback_ops_keep_the_weight_alive(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Complex(), (torch.randn(8, 8),))
    schedule = module.program.methods[0].schedule
    access = next(a for a in schedule.accesses if a.weight == "w")
    assert schedule.last_step[access.number] > schedule.first_step[access.number]


class Stack(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x


@pytest.mark.parametrize(
    "configs",
    [
        {"reorder_for_locality": True, "reorder_for_peak_memory": True},
        pytest.param({"combo_kernels": True, "benchmark_combo_kernel": False}, marks=pytest.mark.slow),
        pytest.param({"memory_planning": True}, marks=pytest.mark.slow),
        pytest.param({"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"}, marks=pytest.mark.slow),
    ],
    ids=["reorder", "combo", "memory_planning", "max_autotune"],
)
def test_5_placement_survives_every_pass_that_reorders(tmp_path: Path, configs: dict[str, object]) -> None:
    module = poisoned(tmp_path, Stack(), (torch.randn(3, 16),), inductor_configs=configs)
    schedule = module.program.methods[0].schedule
    # Fetched right before the first reader: never more lent at once than two neighbouring steps read.
    assert module.sessions["forward"].peak_bytes <= exact_floor_bytes(module.program)
    assert [schedule.first_step[a.number] for a in schedule.accesses] == sorted(
        schedule.first_step[a.number] for a in schedule.accesses
    )


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes = nn.Linear(4, 4)
        self.no = nn.Linear(4, 4)
        self.after = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda v: self.yes(v), lambda v: self.no(v) * 2, (x,))
        return self.after(y)


def test_6_branches_are_one_step_of_the_main_graph(tmp_path: Path) -> None:
    model = Branches()
    module = poisoned(tmp_path, model, (torch.ones(2, 4),))
    torch.testing.assert_close(module(-torch.ones(2, 4)), model(-torch.ones(2, 4)))
    pinned = {a.weight for a in module.program.methods[0].schedule.accesses if a.pinned}
    assert pinned == {"yes.weight", "yes.bias", "no.weight", "no.bias"}
    # What stays in place is counted: the floor holds all four beside the rest.
    assert exact_floor_bytes(module.program) >= 2 * (4 * 4 + 4) * 4


def test_6_fetches_inside_a_subgraph_are_refused() -> None:
    from penstock.export.method import _Recorder

    inside = emission()
    recorder = _Recorder()
    with pytest.raises(ScheduleError, match="body_graph_0"):
        recorder(Emission("body_graph_0", inside.nodes, inside.outputs, inside.aliases))
    assert isinstance(recorder.failure, ScheduleError)


class OnlyReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.randn(4))
        self.returned = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.read, self.returned


def test_7_weight_read_only_by_the_output_is_fetched(tmp_path: Path) -> None:
    module = poisoned(tmp_path, OnlyReturned(), (torch.randn(4),))
    assert sorted(schedule_weights(module)) == ["read", "returned"]


def test_7_backstop_refuses_a_fetch_that_nobody_reads() -> None:
    with pytest.raises(ScheduleError, match=r"accesses \[3\]"):
        derive(emission(reader=False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.between = Stack16to8()
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.embed(ids)))


class Stack16to8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_8_tied_weight_is_fetched_anew_for_each_use(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Tied(), (torch.arange(5),))
    names = schedule_weights(module)
    assert names.count("embed.weight") == 2
    schedule = module.program.methods[0].schedule
    for access in schedule.accesses:
        if access.weight == "embed.weight":
            assert schedule.first_step[access.number] == schedule.last_step[access.number]
    stored = next(w for w in module.program.weights if w.name == "embed.weight")
    assert stored.aliases == ("head.weight",)
    assert len({w.name for w in module.program.weights}) == 9


def test_9_collectives_are_refused_by_name() -> None:
    program = offloaded(Stack(1), (torch.randn(3, 16),))
    with program.graph.inserting_before(program.graph.output_node()):
        program.graph.call_function(
            torch.ops._c10d_functional.wait_tensor.default, (program.graph.output_node().args[0][0],)
        )
    with pytest.raises(UnsupportedProgramError, match="_c10d_functional.wait_tensor"):
        make_weightless(program, torch.device("cpu"), frozenset())


def test_9_backstop_refuses_reads_that_outlast_their_launch() -> None:
    with pytest.raises(UnsupportedProgramError, match="collectives and user streams"):
        derive(emission(node("collective", uses={"buf1"}, asynchronous=True, kernel="_CollectiveKernel")))


class Layouts(nn.Module):
    """Channels-last, transposed, strided and overlapping weights: the op carries no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.gapped = nn.Parameter(torch.randn(6, 16)[:, ::2])
        self.register_buffer("expanded", torch.randn(1, 8).expand(6, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.conv(x),
            y @ self.transposed,
            (self.permuted * 2).reshape(-1),
            y @ self.gapped + y @ self.expanded,
        )


def test_10_layouts_are_stored_in_dim_order(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Layouts(), (torch.randn(1, 3, 8, 8), torch.randn(2, 6)))
    orders = {w.name: w.dim_order for w in module.program.weights}
    assert orders == {
        "conv.weight": (0, 2, 3, 1),
        "conv.bias": (0,),
        "transposed": (1, 0),
        "permuted": (1, 2, 0),
        "gapped": (0, 1),
        "expanded": (0, 1),
    }


def test_11_one_session_follows_one_run_at_a_time(tmp_path: Path) -> None:
    """Two runs that interleave make accesses that no record has: the session fails at the first one."""
    result = compiled(tmp_path, offloaded(Stack(2), (torch.randn(3, 16),)))
    from penstock.verify.module import PoisonedModule

    module = PoisonedModule(result.program_path)
    x = torch.randn(3, 16)
    module(x)
    method, session = module.compiled("forward"), module.sessions["forward"]
    with pytest.raises(ScheduleError, match="after the last recorded one"):
        session.run(lambda: method([x]) + method([x]))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 50257 // 7, bias=False)  # an odd width, as 50257 is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_12_misaligned_weights_are_not_padded_into_copies(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Odd(), (torch.randn(4, 64),))
    method = module.program.methods[0]
    assert method.temporaries == ()
    assert method.activation_example_bytes < next(w for w in module.program.weights).nbytes


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.to(torch.float32)


def test_12_copies_that_remain_are_listed_by_name(tmp_path: Path) -> None:
    module = poisoned(tmp_path, Casts(), (torch.randn(4, 16),))
    (temporary,) = module.program.methods[0].temporaries
    assert temporary.weights == ("w",)
    assert temporary.nbytes == 16 * 16 * 4


# ------------------------------------------------------------------------------------------ emissions made by hand


def node(name: str, *, uses: set[str] = frozenset(), mutates: tuple[str, ...] = (), **more: object) -> EmittedNode:  # type: ignore[assignment]
    kernel = more.pop("kernel", name)
    return EmittedNode(name, kernel, (Buffer(name, 4, 4),), (name,), frozenset(uses), mutates, **more)  # type: ignore[arg-type]


def emission(
    *more: EmittedNode,
    reader: bool = True,
    outputs: tuple[str, ...] = ("out",),
    aliases: dict[str, tuple[str, ...]] | None = None,
) -> Emission:
    """A fetch (two nodes, as the compiler has it), a reader of it, and whatever else."""
    nodes = [
        node("buf0", fetch=3),
        node("buf1", uses={"buf0"}, unpacks=("buf0",)),
        node("out", uses={"buf1"} if reader else {"input"}),
        *more,
    ]
    return Emission("main", tuple(nodes), outputs, aliases or {})


def test_a_fetch_is_two_nodes_and_moves_as_one() -> None:
    nodes = (
        node("buf0", fetch=3),
        node("buf1", uses={"buf0"}, unpacks=("buf0",)),
        node("other", uses={"input"}),
        node("out", uses={"buf1", "other"}),
    )
    result = derive(Emission("main", nodes, ("out",)))
    assert result.order == (2, 0, 1, 3)
    assert result.accesses == (3,)
    assert result.step_nodes == (3,)


def test_an_access_that_is_emitted_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="emitted twice"):
        derive(emission(node("again", fetch=3)))


def test_penstock_is_imported_lazily() -> None:
    assert penstock.compile.__module__ == "penstock.export.compile"
