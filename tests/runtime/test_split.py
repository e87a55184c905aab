"""Linears whose weight lies in two places: what the session computes, counts and refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.direct.recipes import LinearCase, LinearRecipe
from penstock.errors import CaptureError, PenstockError, RuntimeFailure, ScheduleDivergedError
from penstock.plan.plan import Plan, Traffic
from penstock.runtime.records import plan_numbers
from tests.harness import bits
from tests.runtime.linears import (
    STREAMED,
    WHOLE,
    Call,
    Handle,
    core_library,
    fetched,
    multiplied,
    products,
    split_plan,
    torch_library,
    write_linears,
)
from tests.runtime.session_harness import PAGE, Model, SessionHarness, slow_copies, staged

ROWS, DEPTH = 200, 40
DTYPES = [torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Every sum of products of these is exact: a result is right or wrong."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Two linears, the first used twice."""
    weights = {"a": numbers(ROWS, DEPTH, seed=1), "b": numbers(3 * DEPTH, ROWS, seed=2)}
    return write_linears(tmp_path / "weights", weights, ["a", "b", "a"])


CALLS = [
    Call(numbers(5, DEPTH, seed=3), numbers(ROWS, seed=4)),
    Call(numbers(1, ROWS, seed=5)),
    Call(numbers(9, DEPTH, seed=6)),
]
SPLITS = [0, 16, 48, 192, WHOLE]


# ---- what is computed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 19])
def test_every_row_is_multiplied_wherever_it_lies(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    weight = whole_numbers(ROWS, DEPTH, seed=1, dtype=dtype)
    x, bias = whole_numbers(tokens, DEPTH, seed=2, dtype=dtype), whole_numbers(ROWS, seed=3, dtype=dtype)
    wanted = (x.double() @ weight.double().T + bias.double()).to(dtype)
    model = write_linears(tmp_path / "weights", {"a": weight}, ["a"])
    with SessionHarness(model) as harness:
        for prefix_rows in [*SPLITS, STREAMED]:
            plan = harness.install_plan(split_plan(model, {"a": prefix_rows}))
            assert plan.methods[0].placements[0].is_split == (prefix_rows > 0)
            assert harness.session.memory()[0] == plan.device_bytes == -(-_prefix_bytes(prefix_rows) // PAGE) * PAGE
            for _ in range(3):
                assert torch.equal(products(harness, [Call(x, bias)])[0], wanted)
                harness.check_counters()


def _prefix_bytes(prefix_rows: int) -> int:
    return (ROWS if prefix_rows in (WHOLE, STREAMED) else prefix_rows) * DEPTH * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_split(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, x = numbers(ROWS, DEPTH, seed=1, dtype=dtype), numbers(11, DEPTH, seed=2, dtype=dtype)
    model = write_linears(tmp_path / "weights", {"a": weight}, ["a"])
    found = []
    with SessionHarness(model) as harness:
        for prefix_rows in SPLITS:
            harness.install_plan(split_plan(model, {"a": prefix_rows}))
            found += products(harness, [Call(x)])
            # A token's sums are the same whatever other tokens there are.
            assert torch.equal(products(harness, [Call(x[:3])])[0], found[0][:3])
    assert all(torch.equal(bits(y), bits(found[0])) for y in found)
    torch.testing.assert_close(found[0], x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once_and_to_nearest_even(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every value of the format, and sums that lie between two: also among subnormals, and beyond the largest."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    scales = torch.tensor([1.0, 0.75, 1.5, 2**-9, 2**-15]).to(dtype)
    bias = torch.tensor([0.0, 2**-24, -1.0, 60000.0, 2**-14]).to(dtype)
    weight = torch.zeros(5, 8, dtype=dtype)
    weight[:, 0] = scales
    weight[:, 1] = 1.0
    x = torch.zeros(2**16, 8, dtype=dtype)
    x[:, 0], x[:, 1] = every, torch.where(shuffled.isfinite(), shuffled, 0.0)
    x[~every.isfinite(), 1] = 0.0
    model = write_linears(tmp_path / "weights", {"a": weight}, ["a"])
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": WHOLE}))
        (found,) = products(harness, [Call(x, bias)])
    # A product of two is exact in 32 bits, so the order in which they are rounded is the whole result.
    sums = x[:, :1].float() * scales.float() + x[:, 1:2].float()
    wanted = (sums + bias.float()).to(dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    # One pattern for all of them, as torch has it.
    assert set(found[found.isnan()].view(torch.int16).tolist()) == {0x7FC0 if dtype == torch.bfloat16 else 0x7E00}
    assert torch.equal(found.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16))


def _tensor(model: Model, name: str) -> Tensor:
    weight = model.weights[name]
    return torch.frombuffer(bytearray(model.content[name]), dtype=torch.bfloat16).view(weight.shape)


def test_operands_that_lie_otherwise_are_copied_first(model: Model) -> None:
    x, bias = CALLS[0].x, numbers(ROWS, seed=4)
    memory = torch.zeros(5 * DEPTH + 1, dtype=torch.bfloat16)
    odd = memory[1:].view(5, DEPTH).copy_(x)
    sparse = torch.zeros(ROWS, 3, dtype=torch.bfloat16)
    sparse[:, 1] = bias
    with SessionHarness(model) as harness:
        for prefixes in ({"a": 48, "b": 16}, {"a": WHOLE, "b": WHOLE}):
            harness.install_plan(split_plan(model, prefixes))
            wanted = products(harness, CALLS)
            for left in (x, x.T.contiguous().T, odd):
                for added in (bias, sparse[:, 1]):
                    assert same(products(harness, [Call(left, added), *CALLS[1:]]), wanted)
            empty = products(harness, [Call(x[:0], bias), *CALLS[1:]])
            assert empty[0].shape == (0, ROWS) and same(empty[1:], wanted[1:])


def test_copies_are_waited_for(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": 16}))
        wanted = products(harness, CALLS)
        with slow_copies(harness.driver, 3_000_000):
            harness.install_plan(split_plan(model, {"a": 64, "b": STREAMED}))
            for _ in range(4):
                assert same(products(harness, CALLS), wanted)
                harness.check_counters()


def test_what_is_split_is_counted_as_read_in_place(model: Model) -> None:
    with SessionHarness(model) as harness:
        plan = harness.install_plan(split_plan(model, {"a": 48, "b": WHOLE}))
        products(harness, CALLS)
        harness.check_counters()
        a, b = model.weights["a"], model.weights["b"]
        in_place_bytes = 2 * (a.nbytes - 48 * a.nbytes // a.shape[0])
        assert harness.last == Traffic(0, 0, b.nbytes, in_place_bytes)
        harness.check_memory(plan.device_bytes)


def test_the_policy_lru_multiplies_with_the_library(model: Model) -> None:
    weights = [_tensor(model, name) for name in "aba"]
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(model.full_bytes)
        found = products(harness, CALLS)
        with pytest.raises(PenstockError, match="offered to the policy lru, which keeps every weight in one"):
            harness.session.offer_linear(Preparing())
    wanted = [torch.nn.functional.linear(c.x, w, c.bias) for c, w in zip(CALLS, weights, strict=True)]
    assert same(found, wanted)


# ---- what is refused


def refused(harness: SessionHarness, match: str, kind: type[Exception] = PenstockError) -> None:
    """The run has failed in the session: it is given up, with this reason, and the next one works."""
    error = harness.session.abort()
    harness._owner = None
    assert isinstance(error, kind) and match in str(error), error


def test_only_what_was_fetched_can_be_multiplied_with(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": 16}))
        wanted = products(harness, CALLS)
        harness.begin()
        lent = fetched(10, (ROWS, DEPTH), torch.bfloat16)
        with pytest.raises(RuntimeError):
            multiplied(CALLS[1].x, lent, None, 11)
        refused(harness, "access 11 was multiplied with before it was fetched", ScheduleDivergedError)
        torch_library().aoti_torch_delete_tensor_object(lent)
        assert same(products(harness, CALLS), wanted)
    outside = c_call_outside_of_a_session()
    assert outside == 1


def c_call_outside_of_a_session() -> int:
    x, out = Handle(CALLS[0].x), ctypes.c_void_p()
    return int(core_library().aoti_torch_cpu_penstock_linear(x.pointer, x.pointer, None, 3, ctypes.byref(out)))


@pytest.mark.parametrize(
    ("x", "bias", "shape", "message"),
    [
        (numbers(5, DEPTH + 8, seed=1), None, (ROWS, DEPTH), "got x (5, 48) of torch's dtype"),
        (numbers(5, DEPTH, seed=1).half(), None, (ROWS, DEPTH), "they make no product"),
        (numbers(5, DEPTH, seed=1)[0], None, (ROWS, DEPTH), "got x (40) of torch's dtype"),
        (numbers(5, DEPTH, seed=1), numbers(3, seed=1), (ROWS, DEPTH), "got a bias (3) of torch's dtype"),
        (numbers(5, DEPTH, seed=1), None, (ROWS - 1, DEPTH), "is of 199 rows of 80 bytes; the plan has 16000 bytes"),
        (numbers(5, 8, seed=1), None, (5 * ROWS, 8), ""),
        (numbers(5, 1000, seed=1), None, (8, 1000), "of them 3840 in device memory, and needs whole rows"),
    ],
)
def test_tensors_that_do_not_fit_the_plan(
    model: Model, x: Tensor, bias: Tensor | None, shape: tuple[int, int], message: str
) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": 16}))
        harness.begin()
        lent = fetched(10, shape, torch.bfloat16)
        if message:
            with pytest.raises(RuntimeError):
                multiplied(x, lent, bias, 10)
            refused(harness, message)
        else:
            # The same bytes as other whole rows: the session cannot know better.
            multiplied(x, lent, bias, 10)
            harness.session.abort()
        torch_library().aoti_torch_delete_tensor_object(lent)


def test_no_plan_leaves_a_linear_to_the_library(tmp_path: Path) -> None:
    """Which may sum in the same order: results do not tell the two apart, but it takes floats of any size."""
    weight, x = torch.randn(32, 8), torch.randn(2, 8)
    model = write_linears(tmp_path / "weights", {"a": weight}, ["a"])
    with SessionHarness(model) as harness:
        for prefix_rows in (16, 0, WHOLE, STREAMED):
            harness.install_plan(split_plan(model, {"a": prefix_rows}))
            with pytest.raises(RuntimeError):
                products(harness, [Call(x)])
            refused(harness, "needs bfloat16 (")


def test_on_a_gpu_no_weight_is_split_without_a_kernel(model: Model) -> None:
    call = core_library().aoti_torch_cuda_penstock_linear
    x, out = Handle(CALLS[0].x), ctypes.c_void_p()
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": WHOLE}))
        harness.begin()
        lent = fetched(10, (ROWS, DEPTH), torch.bfloat16)
        assert call(x.pointer, lent, None, 10, ctypes.byref(out)) == 1
        torch_library().aoti_torch_delete_tensor_object(lent)
        refused(harness, "the weight of access 10 is split, and no kernel was offered that reads it in two places")


def test_what_torch_refuses_is_torchs_to_tell(tmp_path: Path) -> None:
    """Generated code raises for it as for any other call of torch's; the session has nothing against the run."""
    weight = torch.ones(32, 8, dtype=torch.bool)
    model = write_linears(tmp_path / "weights", {"a": weight}, ["a"])
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(model.full_bytes)
        with pytest.raises(RuntimeError, match="the linear failed"):
            products(harness, [Call(weight[:2])])
        assert harness.session.abort() is None


def test_the_calling_thread_computes_for_itself_alone(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": WHOLE}))
        with pytest.raises(RuntimeError):
            products(harness, CALLS, harness.stream())
        refused(harness, "was asked for on a stream, and without a kernel the calling thread makes it")


def test_staged_memory_has_no_tail_to_read(model: Model) -> None:
    with SessionHarness(model, source=staged()) as harness:
        with pytest.raises(PenstockError, match="needs registered host memory"):
            harness.install_plan(split_plan(model, {"a": 48, "b": WHOLE}))
        assert harness.session.memory()[0] == 0


def test_records_that_make_no_split(model: Model) -> None:
    plan = split_plan(model, {"a": 48, "b": 16})
    good = list(plan_numbers(plan, model.weights))
    nbytes = model.weights["a"].nbytes
    # The record of the first access, by its number, weight and size.
    weight = list(model.weights).index("a")
    first = next(at for at in range(len(good)) if good[at : at + 3] == [10, weight, nbytes])
    assert good[first : first + 7] == [10, weight, nbytes, 0, 0, -1, 48 * DEPTH * 2]
    wrong = [
        ({6: 0}, "is 0, needs to be in [1,"),
        ({6: nbytes}, f"is {nbytes}, needs to be in [-1, {nbytes})"),
        ({6: -2}, "is -2, needs"),
        ({3: -2, 4: 0}, "needs to be in [-1, 0)"),
        ({3: -1}, "needs to be in [-1, 0)"),
        ({4: PAGE - 8}, f"is {PAGE - 8}, needs to be in [0, {PAGE - 48 * DEPTH * 2 + 1})"),
        ({6: -1}, "is 0, needs to be in [0,"),
        ({1: -1}, f"is -1, needs to be in [0, {len(model.weights)})"),
        ({1: len(model.weights)}, f"needs to be in [0, {len(model.weights)})"),
        ({2: nbytes - 1}, f"is {nbytes - 1}, needs to be in [{nbytes}, {nbytes + 1})"),
        ({2: nbytes + 1}, f"is {nbytes + 1}, needs to be in [{nbytes}, {nbytes + 1})"),
    ]
    with SessionHarness(model) as harness:
        for changes, message in wrong:
            bad = list(good)
            for at, value in changes.items():
                bad[first + at] = value
            with pytest.raises(PenstockError) as caught:
                harness.session.install((ctypes.c_int64 * len(bad))(*bad))
            assert message in str(caught.value), changes
        harness.session.install((ctypes.c_int64 * len(good))(*good))


def test_a_head_that_streams_is_refused(model: Model) -> None:
    plan = split_plan(model, {"a": WHOLE, "b": STREAMED})
    good = list(plan_numbers(plan, model.weights))
    nbytes = model.weights["b"].nbytes
    weight = list(model.weights).index("b")
    first = next(at for at in range(len(good)) if good[at : at + 3] == [11, weight, nbytes])
    assert good[first + 5] == 0
    good[first + 6] = ROWS * 2 * 16
    with SessionHarness(model) as harness, pytest.raises(PenstockError, match=r"is 0, needs to be in \[-1, 0\)"):
        harness.session.install((ctypes.c_int64 * len(good))(*good))


# ---- recipes: how a kernel is asked for


class Preparing:
    """Keeps what it was asked for, and says yes unless told otherwise."""

    def __init__(self, action: Callable[[LinearCase, LinearRecipe], None] | None = None) -> None:
        self.cases: list[LinearCase] = []
        self._action = action

    def __call__(self, case: int, recipe: int) -> None:
        asked = LinearCase.from_buffer_copy(LinearCase.from_address(case))
        self.cases.append(asked)
        if self._action is not None:
            self._action(asked, LinearRecipe.from_address(recipe))


def launch_fails(harness: SessionHarness, call: Call = CALLS[0]) -> None:
    """The soft driver has no kernels: how far it comes is up to the launch."""
    harness.begin()
    lent = fetched(10, (ROWS, DEPTH), torch.bfloat16)
    with pytest.raises(RuntimeError):
        multiplied(call.x, lent, call.bias, 10)
    torch_library().aoti_torch_delete_tensor_object(lent)


def prepared(harness: SessionHarness, plan: Plan, preparing: Preparing) -> None:
    harness.session.offer_linear(preparing)
    harness.install_plan(plan)


def test_a_recipe_is_asked_for_once_for_each_case(model: Model) -> None:
    def fill(case: LinearCase, recipe: LinearRecipe) -> None:
        assert ctypes.addressof(recipe) % 128 == 0 and not any(bytes(recipe))

    preparing = Preparing(fill)
    with SessionHarness(model) as harness:
        prepared(harness, split_plan(model, {"a": 48, "b": WHOLE}), preparing)
        for _ in range(2):
            for call in (CALLS[0], CALLS[2]):
                launch_fails(harness, call)
                refused(harness, "the soft driver launches no kernels")
        assert [(case.access, case.tokens) for case in preparing.cases] == [(10, 5), (10, 9)]
        case = preparing.cases[0]
        assert (case.method, case.rows, case.depth, case.prefix_rows, case.is_bf16) == (0, ROWS, DEPTH, 48, 1)
        nbytes = model.weights["a"].nbytes
        prefix_bytes = 48 * DEPTH * 2
        assert ctypes.string_at(case.prefix_address, prefix_bytes) == model.content["a"][:prefix_bytes]
        assert ctypes.string_at(case.rest_address, nbytes - prefix_bytes) == model.content["a"][prefix_bytes:]
        # Another plan has other addresses, also of as many rows; and another offer other kernels.
        for prefix_rows in (0, 48):
            harness.install_plan(split_plan(model, {"a": prefix_rows, "b": WHOLE}))
            launch_fails(harness)
            refused(harness, "the soft driver launches no kernels")
            assert preparing.cases[-1].prefix_rows == prefix_rows
        case = preparing.cases[2]
        assert (case.prefix_rows, case.prefix_address) == (0, 0)
        assert ctypes.string_at(case.rest_address, nbytes) == model.content["a"]
        harness.session.offer_linear(preparing)
        launch_fails(harness)
        refused(harness, "the soft driver launches no kernels")
        assert len(preparing.cases) == 5
        # What lies whole in device memory is ours too.
        harness.install_plan(split_plan(model, {"a": WHOLE, "b": WHOLE}))
        launch_fails(harness)
        refused(harness, "the soft driver launches no kernels")
        case = preparing.cases[5]
        assert (case.prefix_rows, case.rest_address) == (ROWS, 0)
        assert ctypes.string_at(case.prefix_address, nbytes) == model.content["a"]


def failed_run(harness: SessionHarness) -> tuple[PenstockError | None, RuntimeError]:
    """The core's error, and what generated code makes of it."""
    harness.begin()
    lent = fetched(10, (ROWS, DEPTH), torch.bfloat16)
    try:
        multiplied(CALLS[0].x, lent, None, 10)
    except RuntimeError as reduced:
        harness._owner = None
        return harness.session.abort(), reduced
    finally:
        torch_library().aoti_torch_delete_tensor_object(lent)
    pytest.fail("a recipe was used that was not made")


def test_why_there_is_no_recipe_is_the_cause(model: Model) -> None:
    def refuse(case: LinearCase, recipe: LinearRecipe) -> None:
        raise ValueError(f"{case.tokens} tokens are too many")

    preparing = Preparing(refuse)
    with SessionHarness(model) as harness:
        prepared(harness, split_plan(model, {"a": 48, "b": WHOLE}), preparing)
        for _ in range(2):
            error, reduced = failed_run(harness)
            assert isinstance(error, RuntimeFailure)
            assert str(error) == (
                "the linear of access 10 with 5 tokens, 200 rows of which 48 are in device memory, depth 40, has no "
                "kernel: 5 tokens are too many"
            )
            assert isinstance(reduced.__cause__, ValueError)
        # It is asked for again, and an error is told once.
        assert len(preparing.cases) == 2
        harness.begin()
        assert harness.session.abort() is None
        harness.begin()
        with pytest.raises(RuntimeError):
            fetched(11, (3 * DEPTH, ROWS), torch.bfloat16)
        error = harness.session.abort()
        assert error is not None and "too many" not in str(error)


def test_nothing_is_prepared_while_a_stream_is_captured(model: Model) -> None:
    preparing = Preparing()
    with SessionHarness(model) as harness:
        prepared(harness, split_plan(model, {"a": 48, "b": WHOLE}), preparing)
        stream = harness.stream()
        harness.session.begin_capture(0, stream)
        lent = fetched(10, (ROWS, DEPTH), torch.bfloat16)
        with pytest.raises(RuntimeError):
            multiplied(CALLS[0].x, lent, None, 10)
        refused(harness, "the linear of access 10 with 5 tokens", CaptureError)
        assert not preparing.cases
        launch_fails(harness)
        refused(harness, "the soft driver launches no kernels")
        # The case has its recipe now, and the capture comes as far as the launch.
        harness.session.begin_capture(0, stream)
        again = fetched(10, (ROWS, DEPTH), torch.bfloat16)
        with pytest.raises(RuntimeError):
            multiplied(CALLS[0].x, again, None, 10)
        refused(harness, "the soft driver launches no kernels")
        assert len(preparing.cases) == 1
        for handle in (lent, again):
            torch_library().aoti_torch_delete_tensor_object(handle)


def test_recipes_are_not_kept_without_end(model: Model) -> None:
    most = 2**14
    preparing = Preparing()
    x = numbers(most + 2, DEPTH, seed=1)
    with SessionHarness(model) as harness:
        prepared(harness, split_plan(model, {"a": 48, "b": WHOLE}), preparing)

        def run(tokens: int) -> None:
            launch_fails(harness, Call(x[:tokens]))
            harness.session.abort()

        for tokens in range(1, most + 2):
            run(tokens)
        asked = len(preparing.cases)
        assert asked == most + 1
        # The first of them is new again, and all that follow.
        run(1)
        assert len(preparing.cases) == asked + 1
        run(1)
        assert len(preparing.cases) == asked + 1


def test_plans_change_only_between_runs(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(split_plan(model, {"a": 48, "b": WHOLE}))
        harness.begin()
        with pytest.raises(PenstockError, match="while a run has not ended"):
            harness.session.offer_linear(Preparing())
        harness.session.abort()
