"""Offloaded programs, compiled and run under poison beside eager mode. Each model holds many cases: compiling is slow.

What is only moved must agree to the bit, what is computed within rounding. Outputs are spoiled after every call, and
must neither change later on nor show in the next call.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as map_over
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map_only

import penstock
from penstock.errors import CompileError
from penstock.program import ConstantSpec
from penstock.verify.module import PoisonedModule
from penstock.weights import read_index
from tests.export.pass_cases import DTYPES, Net, accumulate, doubled, random_bits, scale_all
from tests.harness import bits, compiled, exact_floor_bytes, leaves, offloaded
from tests.zoo import decoder, export, quantized

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
Call = tuple[tuple[Any, ...], dict[str, Any]]


def kept(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and bool(a.numel() and b.numel())


def assert_like_eager(found: Any, wanted: Any) -> None:
    """Under "exact" to the bit, elsewhere within rounding."""
    if isinstance(wanted, dict) and "exact" in wanted:
        for ours, theirs in zip(leaves(found["exact"]), leaves(wanted["exact"]), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(bits(ours.resolve_conj()), bits(theirs.resolve_conj()))
    torch.testing.assert_close(leaves(found), leaves(wanted), check_stride=False, equal_nan=True)


class Compared:
    """A compiled model and its eager twin, called in turn."""

    def __init__(self, module: PoisonedModule, references: dict[str, Callable[..., Any]]) -> None:
        self.module, self.references = module, references
        self._returned: list[tuple[Any, Any]] = []

    def call(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        ours, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        with torch.no_grad():
            wanted = kept(self.references[method](*theirs[0], **theirs[1]))
        found = self.module.run_method(method, *ours[0], **ours[1])
        assert_like_eager(found, wanted)
        torch.testing.assert_close(leaves(ours), leaves(theirs))  # what became of the inputs
        for output in leaves(found):
            for name, state in self.module.states.items():
                assert not same_memory(output, state), f"an output lies in the state {name}"
        for earlier, copied in self._returned:
            torch.testing.assert_close(leaves(earlier), leaves(copied), rtol=0, atol=0, equal_nan=True)
        inputs = leaves(ours)
        own = [t for t in leaves(found) if not any(same_memory(t, i) for i in inputs)]
        result = kept(found)
        if len(self._returned) % 2:  # every other time the caller spoils what it got
            for tensor in own:
                tensor.view(-1).fill_(0) if tensor.is_contiguous() else None
        self._returned.append((own, kept(own)))
        return result


def compare(folder: Path, model: nn.Module, calls: Sequence[Call], change: Any = None, **options: Any) -> Compared:
    """`change` is what happens to the offloaded program before it is compiled."""
    model = model.eval().requires_grad_(False)
    args, kwargs = calls[0]
    reference = copy.deepcopy(model)
    program = offloaded(model, args, options.pop("dynamic_shapes", None), kwargs)
    result = compiled(folder, change(program) if change else program, **options)
    compared = Compared(PoisonedModule(result.program_path), {"forward": reference})
    for args, kwargs in calls:
        compared.call(*args, **kwargs)
    return compared


def reloaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def accesses(module: PoisonedModule, method: str = "forward") -> list[tuple[str, bool]]:
    return sorted({(a.weight, a.pinned) for a in module.program.method(method).schedule.accesses})


# ------------------------------------------------------------------------------------------------------------- weights


class Weights(Net):
    """Every way to read a weight, and every way to return one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        square = {
            name: torch.randn(4, 4) for name in ("w", "halves", "rows", "typed", "both", "plain", "cloned", "late")
        }
        complex_ = {name: torch.randn(4, 4, dtype=torch.complex64) for name in ("z", "buffer_y")}
        super().__init__(
            Weights.read,
            **square,
            **complex_,
            buffer_conjugated=torch.randn(4, 4, dtype=torch.complex64).conj(),
            last=torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
            transposed=torch.randn(4, 4).t(),
            gapped=torch.randn(4, 8)[:, ::2],
            expanded=torch.randn(1, 4).expand(4, 4),
            inside=torch.randn(40)[7:23].view(4, 4),
            scale=torch.tensor(1.5),
            buffer_count=torch.tensor(3),
            empty=torch.randn(0, 4),
            transient_t=torch.randn(4),
            constant_c=torch.randn(4),
            unread=torch.randn(5),
        )

    def read(self, x: Tensor) -> dict[str, Any]:
        left, right = self.halves.split(2, dim=1)
        rows = self.rows.unbind(0)
        raw = self.typed.view(torch.int32)
        y = torch.relu(x @ self.late)
        z = torch.complex(x, x + 1)
        exact = [
            self.plain, self.plain, self.plain.t(), self.plain[1:3], self.cloned.clone(), self.halves.chunk(2)[1],
            rows[2], self.last, self.transposed, self.gapped, self.gapped.t().reshape(-1), self.expanded,
            self.inside.contiguous(), raw, raw + 1, self.scale, self.empty, self.empty.t(), torch.cat([self.empty, x]),
            self.buffer_count + 1, self.z.conj(), self.z.mH[1:], self.z.real, self.z.conj().imag,
            self.buffer_conjugated,
            torch.view_as_real(self.buffer_y), self.w.as_strided((2, 2), (1, 4), 2), x, torch.cat([self.cloned]),
        ]  # fmt: skip
        for _ in range(3):
            y = torch.relu(y @ left @ right.t() + rows[3])
        close = [
            x @ self.w.t(), y @ self.w.t(), y @ self.late, torch.mm(self.both, self.both.t()), self.both + self.both,
            F.conv2d(x.view(1, 1, 4, 4).expand(1, 3, 4, 4), self.last), self.transposed @ y, self.gapped @ y,
            self.expanded * y + self.inside, y * self.scale, y * self.scale.item(), self.empty.sum(0) + y,
            y * self.transient_t + self.constant_c, y + torch.tensor([1.0, 2.0, 3.0, 4.0]), z @ self.z.conj(),
            self.buffer_conjugated * z, torch.stack(rows[:2]) * 2, (raw >> 3) & 7,
        ]  # fmt: skip
        return {"exact": exact, "close": close}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    calls: list[Call] = [((torch.randn(4, 4),), {}) for _ in range(4)]
    return compare(tmp_path_factory.mktemp("weights"), Weights(), calls)


def test_weights_are_read_and_returned(weights: Compared) -> None:
    program = weights.module.program
    assert not program.states
    # Nothing here is read where no schedule can follow, and everything that is read is in the file, once.
    assert not any(pinned for _, pinned in accesses(weights.module))
    names = {w.name for w in program.weights}
    index = read_index(weights.module.path.with_suffix(".ptd"))
    assert {entry.name for entry in index} == names
    assert names >= {"w", "halves", "rows", "late", "buffer_conjugated", "transient_t", "constant_c", "scale"}
    # A tensor without elements takes no kernel that would read it.
    assert program.unused == ("empty", "unread")


def test_a_weight_is_held_for_one_use_at_a_time(weights: Compared) -> None:
    """`late` and `w` are read at both ends of the program, `halves` and `rows` in a chain between."""
    record = weights.module.program.methods[0].schedule
    uses = [a.number for a in record.accesses if a.weight == "late"]
    assert len(uses) == 2
    assert all(record.first_step[number] == record.last_step[number] for number in uses)
    first, last = sorted(record.first_step[number] for number in uses)
    assert last - first > 3
    assert not any("late" in record.live_weights(step) for step in range(first + 1, last))
    peak_bytes = weights.module.sessions["forward"].peak_bytes
    assert peak_bytes <= exact_floor_bytes(weights.module.program) < weights.module.program.weight_bytes


# What the compiler has no type for in the code that it generates for a CPU.
LACKING = {"float8_e8m0fnu", *(name for name in DTYPES if name.startswith("float8") and TORCH < (2, 12))}


class EveryDtype(Net):
    """Random bytes, NaN payloads among them: gathered, returned, moved, cast, and seen as bytes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        names = [name for name in DTYPES if name not in LACKING or TORCH >= (2, 12)]
        super().__init__(EveryDtype.read, **{f"buffer_{name}": random_bits(DTYPES[name], 3, 8) for name in names})

    def read(self, x: Tensor) -> dict[str, list[Tensor]]:
        exact = []
        for name, w in self.named_buffers():
            exact.append(w[x])
            if name.removeprefix("buffer_") not in LACKING:
                exact += [w, ~w if w.dtype is torch.bool else w.view(torch.uint8) + 1]
            if w.element_size() == 1 and w.is_floating_point():
                exact.append(w.to(torch.float64))
            if w.dtype in (torch.bfloat16, torch.complex64):
                exact.append(w.t().contiguous())
        return {"exact": exact}


def test_every_dtype_to_the_bit(tmp_path: Path) -> None:
    calls: list[Call] = [((torch.tensor([2, 0]),), {}), ((torch.tensor([1, 1]),), {})]
    model = EveryDtype()
    module = compare(tmp_path, model, calls).module
    wanted = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in model.named_buffers()}
    assert {w.name: w.dtype for w in module.program.weights} == wanted
    assert len(wanted) >= 16


@pytest.mark.parametrize("name", sorted(LACKING & {"float8_e4m3fn", "float8_e8m0fnu"}))
def test_a_dtype_that_the_compiler_lacks_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model = Net(lambda net, x: net.buffer_w, buffer_w=random_bits(DTYPES[name], 4, 4))
    try:
        compare(tmp_path, model, [((torch.ones(1),), {})])
    except CompileError as error:
        assert name in str(error).lower()  # noqa: PT017  later versions of torch may have it


def test_custom_operators_after_decomposing(tmp_path: Path) -> None:
    """Read by operators of the user's, of which one writes into a copy of a weight; with the default decompositions."""

    def forward(net: Net, x: Tensor) -> dict[str, Any]:
        fresh, copied, part = torch.zeros_like(x), net.c.clone(), net.c.clone()
        accumulate(x, net.a, fresh)
        accumulate(x, net.b.t(), copied)
        accumulate(x, net.a[:, :2], part[:, :2])
        normed = F.layer_norm(F.gelu(F.linear(x, net.a, net.bias)), (4,), net.bias)
        return {
            "exact": [net.c, net.a.t()],
            "close": [doubled(x, net.a), fresh, copied, part, normed, *scale_all([net.a, net.b.t(), net.c[1:]])],
        }

    torch.manual_seed(0)
    model = Net(forward, bias=torch.randn(4), **{name: torch.randn(4, 4) for name in "abc"})
    calls: list[Call] = [((torch.randn(4, 4),), {}) for _ in range(2)]
    compared = compare(tmp_path, model, calls, change=lambda program: program.run_decompositions())
    assert accesses(compared.module) == [("a", False), ("b", False), ("bias", False), ("c", False)]


def test_quantized_weights(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    case = quantized.quantized_decoder("int8", dataclasses.replace(decoder.TINY, layers=1))
    reference = copy.deepcopy(case.module)
    result = compiled(tmp_path, penstock.apply_weight_offload(export(case)))
    compared = Compared(PoisonedModule(result.program_path), {"forward": reference})
    for _ in range(3):
        compared.call(*case.args)
    stored = [w for w in result.program.weights if w.dtype == "int8"]
    assert len(stored) >= 7
    assert sum(w.nbytes for w in stored) > result.program.weight_bytes / 4


# --------------------------------------------------------------------------------------------------------------- state


class Stateful(Net):
    """States of every kind: stored and zero, written in every way, returned in every way, swapped, and only read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            Stateful.write,
            w=torch.randn(4, 4),
            written=torch.randn(4, 4),
            buffer_stored=torch.randn(4, 4),
            buffer_zeros=torch.zeros(4, 4),
            buffer_minus=-torch.zeros(4),
            buffer_cache=torch.zeros(2, 6, 4),
            transient_seen=torch.zeros(4, 4),
            buffer_custom=torch.randn(4, 4),
            buffer_one=torch.randn(4),
            buffer_two=torch.randn(4),
            buffer_transposed=torch.randn(2, 4).t(),
            buffer_complex=torch.randn(4, dtype=torch.complex64),
            buffer_steps=torch.tensor(7),
            buffer_set=torch.ones(4),
            buffer_window=torch.randn(4, 4),
            buffer_turned=torch.randn(4, 4),
        )

    def write(self, x: Tensor, at: Tensor) -> dict[str, Any]:
        old = self.buffer_stored.clone()
        self.buffer_stored.add_(x)
        self.buffer_zeros.index_put_((at,), (x @ self.w)[:1])
        self.buffer_cache[:, 1:3] = x[:2, None] * 2
        self.buffer_cache.index_copy_(1, at + 2, x[None, :1].expand(2, 1, 4).contiguous())
        self.transient_seen[at] = x[:1]
        self.written.mul_(0.5)
        accumulate(x, self.w, self.buffer_custom)
        first = self.buffer_one.clone()
        self.buffer_one.copy_(self.buffer_two)
        self.buffer_two.copy_(first)
        self.buffer_transposed.add_(1)
        self.buffer_complex.mul_(1j)
        self.buffer_steps += 1
        self.buffer_set.copy_(self.w[0])
        self.buffer_minus.mul_(1)
        self.buffer_window[1:].copy_(self.buffer_window[:-1].clone())  # a window that slides by one
        self.buffer_turned.copy_(self.buffer_turned.t().clone())
        exact = [
            old, self.buffer_stored, self.buffer_stored.t(), self.buffer_stored.split(2)[0], self.buffer_stored.clone(),
            self.transient_seen, self.transient_seen.unbind(0)[1], self.transient_seen.clone(),
            self.written[1:].clone(),
            self.buffer_one, self.buffer_two.clone(), self.buffer_transposed, self.buffer_steps, self.buffer_set,
            self.buffer_minus.clone(), self.buffer_cache[0].clone(), self.buffer_complex.conj(),
        ]  # fmt: skip
        close = [
            self.buffer_zeros, self.buffer_zeros.clone(), self.buffer_custom, self.buffer_custom.clone(),
            self.buffer_custom.chunk(2)[1], self.written @ self.w, self.buffer_cache.sum(1),
        ]  # fmt: skip
        return {"exact": exact, "close": close}

    def read(self, x: Tensor) -> dict[str, Any]:
        exact = [
            self.buffer_stored, self.buffer_stored.split(2)[0], self.buffer_stored.unbind(0)[1],
            self.buffer_stored.view(2, 8), self.buffer_stored.clone(), self.buffer_cache.chunk(2, 1)[0],
            self.transient_seen[1:].clone(), self.buffer_set.contiguous(), torch.cat([self.buffer_one]),
            self.buffer_two.expand(2, 4), self.buffer_transposed.t(), self.buffer_complex.real, self.buffer_steps,
            self.written, self.written.to(torch.float32), self.buffer_minus, self.w,
        ]  # fmt: skip
        return {"exact": exact, "close": [self.buffer_zeros @ x, self.buffer_custom + self.w @ x]}


class Method(nn.Module):
    def __init__(self, model: Stateful, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Tensor) -> Any:
        return getattr(self.model, self.name)(*args)


def test_state_is_kept_between_methods_and_runs(tmp_path: Path) -> None:
    model = Stateful().requires_grad_(False)
    reference = copy.deepcopy(model)
    x, at = torch.randn(4, 4), torch.tensor([1])
    programs = {"read": offloaded(Method(model, "read"), (x,)), "write": offloaded(Method(model, "write"), (x, at))}
    program = compiled(tmp_path, programs).program
    # What one method writes is state in both. Weights are what is left.
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert {s.name for s in program.states} == {f"model.{name}" for name in names - {"w"}}
    assert [w.name for w in program.weights] == ["model.w"]
    zeros = {"buffer_zeros", "buffer_cache", "transient_seen"}
    assert {s.name.removeprefix("model.") for s in program.states if s.init == "zeros"} == zeros
    assert program.state_bytes == sum(s.nbytes for s in program.states)

    for _ in range(2):  # loaded anew, a model starts from its first values
        twin = copy.deepcopy(reference)
        compared = Compared(PoisonedModule(tmp_path / "model.pt2"), {"read": twin.read, "write": twin.write})
        compared.call(x, method="read")
        for step in range(4):
            compared.call(torch.randn(4, 4), torch.tensor([step % 3]), method="write")
            compared.call(torch.randn(4, 4), method="read")
        for name, state in compared.module.states.items():
            wanted = dict(twin.state_dict(), transient_seen=twin.transient_seen)[name.removeprefix("model.")]
            torch.testing.assert_close(state, wanted, check_stride=False)


# -------------------------------------------------------------------------------------------------------- control flow


class Flow(Net):
    def __init__(self) -> None:
        torch.manual_seed(0)
        names = ("split", "yes", "no", "turned", "limit", "step", "carried", "whole", "after")
        super().__init__(
            Flow.run,
            inner=torch.randn(4),
            buffer_state=torch.randn(4),
            **{name: torch.randn(4, 4) for name in names},
        )

    def run(self, x: Tensor, y: Tensor, count: Tensor) -> dict[str, Any]:
        part, rest = self.split.split(2, dim=1)
        positive = x.sum() > 0
        chosen = torch.cond(positive, lambda v, p: v @ p, lambda v, p: v[:, :2] * p, (x, part)) + rest
        copied = torch.cond(positive, lambda v: self.yes.clone(), lambda v: self.no + v, (x,))
        turned = torch.cond(
            positive, lambda v, t: t[1:].contiguous(), lambda v, t: (t[1:] * v[1:]).contiguous(), (x, self.turned.t())
        )

        def more(i: Tensor, *values: Tensor) -> Tensor:
            return (i < count) & (self.limit.sum() < 1e9)

        def body(i: Tensor, row: Tensor, whole: Tensor, state: Tensor, given: Tensor) -> tuple[Tensor, ...]:
            row = torch.cond(i > 0, lambda v: v + self.inner, lambda v: v * 2, (row,))
            return i + 1, row + self.step[0], whole + self.step, state + self.step[1], given + self.step[2]

        start = torch.zeros((), dtype=torch.int64)
        carried = (start, self.carried.unbind(0)[1], self.whole, self.buffer_state, y)
        looped = torch.while_loop(more, body, carried)
        self.buffer_state.copy_(looped[3] * 2)
        y.add_(1)
        return {"looped": looped, "chosen": (chosen, copied, turned, x @ self.after), "state": self.buffer_state}


def test_weights_in_branches_and_loops(tmp_path: Path) -> None:
    x, y = torch.rand(4, 4) + 0.1, torch.randn(4)
    # Loops without a trip return what they carry: a weight, a view of one, a state, an input that is written later.
    calls: list[Call] = [((sign * x, y, torch.tensor(n)), {}) for sign, n in ((1, 0), (-1, 0), (1, 3), (-1, 1), (1, 0))]
    module = compare(tmp_path, Flow(), calls).module
    pinned = {"split", "yes", "no", "turned", "limit", "step", "inner"}
    assert accesses(module) == sorted(
        [(name, True) for name in pinned] + [(name, False) for name in ("split", "carried", "whole", "after")]
    )
    # What stays in place is counted: the floor holds it all, beside what is fetched in between.
    pinned_bytes = sum(w.nbytes for w in module.program.weights if w.name in pinned)
    assert pinned_bytes == (6 * 16 + 4) * 4
    assert exact_floor_bytes(module.program) > pinned_bytes


def test_weights_in_scans_and_maps(tmp_path: Path) -> None:
    def forward(net: Net, x: Tensor) -> tuple[Any, ...]:
        return (
            map_over(lambda v, w: v * w + net.read[0], x, net.extra.split(1)[0][0]),
            map_over(lambda v: v + 1, net.mapped),
            scan(lambda carry, v: (carry * net.body[0] + v, carry + v), net.init.unbind(0)[1], x),
            scan(lambda carry, v: (carry + v, carry * v), x[0], net.scanned),
            associative_scan(lambda a, b: a * b, net.associative, 0, combine_mode="generic") + x,
        )

    torch.manual_seed(0)
    names = ("read", "extra", "mapped", "body", "init", "scanned", "associative")
    model = Net(forward, **{name: torch.randn(4, 4) for name in names})
    calls: list[Call] = [((torch.randn(4, 4),), {}) for _ in range(3)]
    if TORCH < (2, 12):
        with pytest.raises(CompileError, match="Inductor could not compile it"):
            compare(tmp_path, model, calls)
        return
    module = compare(tmp_path, model, calls).module
    pinned = {"read", "extra", "mapped", "body", "scanned"}
    assert accesses(module) == sorted((name, name in pinned) for name in names)
    assert exact_floor_bytes(module.program) > sum(w.nbytes for w in module.program.weights if w.name in pinned)


# -------------------------------------------------------------------------------------------------- inputs and outputs


class Nested(Net):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Nested.run, w=torch.randn(4, 4))

    def run(self, x: Tensor, view: Tensor, spread: Tensor, *, table: Any, flag: bool, nothing: None, count: int) -> Any:
        y = x @ self.w + table["p"]["q"] * count + view.t() + spread
        table["p"]["written"].add_(self.w[0])
        table["whole"].copy_(self.w)
        written = table["p"]["written"]
        return {
            "y": y, "again": [y, (y, None, 7, "text", 2.5)], "input": x, "view": view, "flag": flag,
            "written": (written, written.view(2, 2), written.clone()), "whole": table["whole"], "w": (self.w, self.w),
        }  # fmt: skip


def nested_call() -> Call:
    base = torch.randn(10, 20)
    table = {"p": {"q": torch.randn(4), "written": torch.randn(4)}, "whole": torch.randn(4, 4)}
    args = (torch.randn(4, 4), base[1:5, 3:19:4], base[0, 1:5].expand(4, 4))  # views, one of them overlapping
    return args, {"table": table, "flag": True, "nothing": None, "count": 5}


def test_nested_arguments_views_and_written_inputs(tmp_path: Path) -> None:
    calls = [nested_call() for _ in range(3)]
    compared = compare(tmp_path, Nested(), calls)
    result = compared.call(*calls[0][0], **calls[0][1])
    assert (result["flag"], result["again"][1][1:]) == (True, (None, 7, "text", 2.5))
    signature = compared.module.program.methods[0].signature
    assert [s.value for s in signature.inputs if isinstance(s, ConstantSpec)] == [True, None, 5]
    assert next(s for s in signature.inputs if s.name == "args_1").strides == (20, 4)


class TiedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.embed(ids))))


def test_strict_export_of_tied_weights_and_dynamic_sizes_after_loading(tmp_path: Path) -> None:
    model = TiedRows().eval().requires_grad_(False)
    ids = torch.arange(6)
    shapes = ({0: Dim("rows", min=1, max=64)},)
    program = reloaded(
        penstock.apply_weight_offload(torch.export.export(model, (ids,), dynamic_shapes=shapes, strict=True))
    )
    result = compiled(tmp_path, program)
    compared = Compared(PoisonedModule(result.program_path), {"forward": model})
    for count in (6, 64, 2, 1, 6):
        compared.call(torch.arange(count) % 16)
    # One set of bytes under both names, although a strict export lists one of them; what nobody reads is left out.
    (tied,) = [w for w in result.program.weights if "head.weight" in w.names]
    assert set(tied.names) == {"embed.weight", "head.weight"}
    assert result.program.unused == ("never.bias", "never.weight")
    index = read_index(result.weights_path)
    assert {e.name for e in index} == {"embed.weight", "head.weight", "middle.weight", "middle.bias"}
    assert index["embed.weight"].offset_bytes == index["head.weight"].offset_bytes
    assert result.program.weight_bytes == (16 * 8 + 8 * 8 + 8) * 4
    assert list(result.program.methods[0].signature.symbols.values()) == [(1, 64)]
