"""The check that a GPU of an untried kind has to pass, with stand-ins for the kernel: right, and wrong in some ways."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.direct import self_check
from penstock.direct.failures import KernelDeviceError
from penstock.direct.self_check import Launch, Product, check_first_use, check_products, products
from penstock.direct.tile_shape import TILE_TOKENS, TOKEN_CTAS, choose_tile
from tests.direct.split_reference import split_linear_reference

CPU = torch.device("cpu")


def right(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
    out.copy_(split_linear_reference(x, prefix, rest, bias))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Of each kind of floats the first products: the others take long on a CPU."""
    for counts in ("BF16_TOKENS", "FP16_TOKENS"):
        monkeypatch.setattr(self_check, counts, getattr(self_check, counts)[:1])
    return list(products())


def test_a_right_kernel_passes(few: list[Product]) -> None:
    asked: list[tuple[int, int, torch.dtype]] = []

    def launch(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
        assert out.isnan().all()
        asked.append((x.shape[0], prefix.shape[0], x.dtype))
        right(x, prefix, rest, bias, out)

    check_products(launch, CPU, (10, 0))
    assert {dtype for *_, dtype in asked} == {torch.bfloat16, torch.float16}
    assert [rows for _, rows, _ in asked] == [0, 16, 272, 520] * len(few)


def stale(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
    """One result is never written."""
    before = out[3, 70].clone()
    right(x, prefix, rest, bias, out)
    out[3, 70] = before


def swapped(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
    """Rows of a tile on both sides change places."""
    if prefix.shape[0] == 272:
        prefix, rest = torch.cat([prefix[:-16], rest[:16]]), torch.cat([prefix[-16:], rest[16:]])
    right(x, prefix, rest, bias, out)


def short(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
    """The last eight columns are left out."""
    right(x[:, :-8], prefix[:, :-8], rest[:, :-8], bias, out)


def no_bias(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
    right(x, prefix, rest, torch.zeros_like(bias), out)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            stale,
            "T=5, N=520, K=3080, torch.bfloat16, 0 rows .* 1 of 2,600 results differ.* token 3 of row 70, is nan and",
        ),
        (swapped, "272 rows in device memory.* row 256, is"),
        (short, "0 rows in device memory.* token 0 of row 0, is .* and must be"),
        (no_bias, "0 rows in device memory"),
    ],
)
def test_a_wrong_one_is_told_by_its_first_result(few: list[Product], wrong: Launch, told: str) -> None:
    with pytest.raises(KernelDeviceError, match=rf"wrongly on cpu: .* capability 10\.0, .*{told}"):
        check_products(wrong, CPU, (10, 0))


def test_what_was_expected_and_what_came(few: list[Product]) -> None:
    def off(x: Tensor, prefix: Tensor, rest: Tensor, bias: Tensor, out: Tensor) -> None:
        right(x, prefix, rest, bias, out)
        out[4, 519] = 12345.0 if out[4, 519] != 12345.0 else 0.0

    wanted = few[0].wanted[4, 519].item()
    with pytest.raises(KernelDeviceError, match=f"token 4 of row 519, is 12352.0 and must be {wanted}"):
        check_products(off, CPU, (12, 0))


def test_every_tile_is_tried() -> None:
    """Of either amount of shared memory; with CTAs that share, and with more tokens than a cluster takes."""
    for options in ({}, {"multicast": False, "shared_limit_bytes": 101_376}):
        every = {choose_tile(tokens, **options).tile_tokens for tokens in range(1, 4097)}  # type: ignore[arg-type]
        tried = [choose_tile(tokens, **options) for tokens in self_check.BF16_TOKENS]  # type: ignore[arg-type]
        assert {tile.tile_tokens for tile in tried} == every
        assert max(tile.token_blocks for tile in tried) > 1
        # Every slot of the longest ring is filled twice.
        assert all(2 * 64 * tile.w_stages < self_check.DEPTH for tile in tried)
    assert max(self_check.BF16_TOKENS) > TILE_TOKENS[-1] * TOKEN_CTAS[-1]


def test_sums_are_exact() -> None:
    largest = self_check.DEPTH * self_check.LARGEST**2 + self_check.LARGEST
    assert largest < 2**24 and largest < torch.finfo(torch.float16).max


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, tuple[int, int]]]:
    calls: list[tuple[torch.device, tuple[int, int]]] = []

    def check(launch: Callable[..., object], device: torch.device, capability: tuple[int, int]) -> None:
        launch(1, 2, 3, 4, 5)
        calls.append((device, capability))

    monkeypatch.setattr(self_check, "check_products", check)
    monkeypatch.setattr(self_check, "_checked", set())
    return calls


class StandIn(SimpleNamespace):
    """A kernel that notes how it was launched."""

    def __call__(self, *operands: int, out: int) -> None:
        self.launched.append((*operands, out))


def kernel_on(ordinal: int, capability: tuple[int, int]) -> Any:
    return StandIn(ordinal=ordinal, capability=capability, device=torch.device("cuda", ordinal), launched=[])


def test_once_for_each_device(checked: list[tuple[torch.device, tuple[int, int]]]) -> None:
    for ordinal in (1, 1, 0, 1):
        kernel = kernel_on(ordinal, (12, 0))
        before = len(checked)
        check_first_use(kernel)
        assert kernel.launched == [(1, 2, 3, 4, 5)] * (len(checked) - before)
    assert checked == [(torch.device("cuda:1"), (12, 0)), (torch.device("cuda:0"), (12, 0))]


def test_the_kernel_of_an_untried_gpu(
    checked: list[tuple[torch.device, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits are bounded there, in what is checked and in what is used."""
    opened: list[Any] = []
    for capability in ((9, 0), (10, 0)):

        def make(device: str, *, bounded_waits: bool = False) -> Any:
            kernel = kernel_on(0, capability)  # noqa: B023 - called in this turn
            kernel.bounded_waits, kernel.closed = bounded_waits, 0
            kernel.close = lambda: setattr(kernel, "closed", kernel.closed + 1)
            opened.append(kernel)
            return kernel

        monkeypatch.setattr(self_check, "SplitLinear", make)
        used = self_check.open_kernel("cuda:0")
        assert used is opened[-1] and not used.closed
        assert (used.bounded_waits, bool(used.launched)) == (capability != (9, 0),) * 2
        assert all(kernel.closed == 1 for kernel in opened[1:-1])
    assert checked == [(torch.device("cuda:0"), (10, 0))]


def test_what_failed_is_not_passed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KernelDeviceError("wrong")

    monkeypatch.setattr(self_check, "check_products", fail)
    monkeypatch.setattr(self_check, "_checked", set())
    for _ in range(2):
        with pytest.raises(KernelDeviceError, match="wrong"):
            check_first_use(kernel_on(0, (10, 0)))
