from __future__ import annotations

import ctypes
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.budget import MAX_BYTES, format_bytes, mb_to_bytes, parse_bytes
from penstock.errors import BudgetError
from penstock.native import core


def _short_id(value: object) -> str:
    return "huge" if isinstance(value, int) and value.bit_length() > 64 else ascii(value)[:20]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (8589934592, 8589934592),
        (MAX_BYTES, MAX_BYTES),
        ("0", 0),
        ("8589934592", 8589934592),
        ("  8589934592\n", 8589934592),
        ("100B", 100),
        ("100 B", 100),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GIB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512 MB", 512 * 10**6),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("1kB", 1000),
        ("1kb", 1000),
        ("2TiB", 2 * 2**40),
        ("2 TB", 2 * 10**12),
        ("1.5GiB", 3 * 2**29),
        ("0.5 KiB", 512),
        ("1.001KB", 1001),
        ("7.0", 7),
        ("0.1MB", 100_000),
        ("1.10GB", 1_100_000_000),
        # The fraction of a byte is cut off, never rounded up: what is asked for is never exceeded.
        ("2.3GiB", 2469606195),
        ("0.1MiB", 104857),
        ("1.1GiB", 1181116006),
        ("0.9999999999999999999999KiB", 1023),
        ("1.0009KB", 1000),
        ("0.0001KB", 0),
        ("8796093022207.9999999999999999999999MiB", MAX_BYTES),
    ],
)
def test_parse(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        -1,
        2**63,
        1 << 100_000,
        8.0,
        float("nan"),
        None,
        b"8GiB",
        "",
        "   ",
        "nan",
        "NaN",
        "inf",
        "-1",
        "-8GiB",
        "+8GiB",
        "8G",
        "8M",
        "8k",
        "8Gi",
        "8Gb",
        "8Gib",
        "8gB",
        "8 giB",
        "8Mb",
        "8PiB",
        "GiB",
        "8 G iB",
        "8GiB 2",
        "1e9",
        "0x10",
        "8_000",
        "8,000",
        "1,5GiB",
        ".5GiB",
        "5.GiB",
        "1.2.3GiB",
        "1.1",
        "0.5",
        "1.3B",
        "8796093022208.0000000000000000000001MiB",
        "\u0668GiB",
        "8\u00a0GiB",
        "8G\u0131B",
        "8589934592GiB",
        "9" * 5000,
        "0." + "0" * 5000 + "GiB",
    ],
    ids=_short_id,
)
def test_refused_with_what_was_given_and_what_is_valid(value: object) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "8GiB" in message and "KiB, MiB, GiB, TiB" in message
    assert len(message) < 500
    if isinstance(value, (str, float)) and len(str(value)) < 60:
        assert repr(value) in message


@settings(derandomize=True)
@given(
    st.decimals(min_value=0, max_value=1000, places=9, allow_nan=False),
    st.sampled_from([("KiB", 2**10), ("MB", 10**6), ("GiB", 2**30)]),
)
def test_the_fraction_is_cut_off_exactly(number: Decimal, unit: tuple[str, int]) -> None:
    name, unit_bytes = unit
    billionths = int(number.scaleb(9))
    assert parse_bytes(f"{number:f}{name}") == billionths * unit_bytes // 10**9


@settings(derandomize=True)
@given(st.integers(min_value=0, max_value=MAX_BYTES))
def test_wire_form_round_trips(n: int) -> None:
    assert parse_bytes(str(n)) == n


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1025, "1 KiB (1025 bytes)"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB (1048575 bytes)"),
        (2**20, "1 MiB"),
        (8 * 2**30, "8 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (10 * 2**30, "10 GiB"),
        (2218786816, "2.07 GiB (2218786816 bytes)"),
        (5000 * 2**40, "5000 TiB"),
        (-1024, "-1 KiB"),
    ],
)
def test_format(n: int, expected: str) -> None:
    assert format_bytes(n) == expected


@settings(derandomize=True)
@given(st.integers(min_value=0, max_value=2**49))
def test_format_never_loses_bytes(n: int) -> None:
    text = format_bytes(n)
    if "(" in text:
        assert text.endswith(f"({n} bytes)")
    else:
        assert parse_bytes(text) == n
    assert not text.startswith("1024 ")


@pytest.mark.parametrize(("mb", "expected"), [(0, 0), (1, 1048576), (512, 536870912)])
def test_mb_is_two_to_the_twenty(mb: int, expected: int) -> None:
    assert mb_to_bytes(mb) == expected


@pytest.mark.parametrize("mb", [-1, True, 1.5, "512", None, 2**44, 1 << 100_000], ids=_short_id)
def test_mb_refused(mb: object) -> None:
    with pytest.raises(BudgetError, match="weight_offload_budget_mb"):
        mb_to_bytes(mb)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, "-1", "-8GiB", "-0.5 GB"])
def test_an_amount_below_nothing_is_named_as_that(value: int | str) -> None:
    with pytest.raises(BudgetError, match="is negative"):
        parse_bytes(value)


def of_core(text: str) -> int | str:
    """What a process without Python takes it for, or says of it."""
    found = ctypes.c_int64(-1)
    if core().penstock_parse_bytes(text.encode(), ctypes.byref(found)):
        return str(core().penstock_failure_text().decode())
    return found.value


def of_python(text: str) -> int | str:
    try:
        return parse_bytes(text)
    except BudgetError as error:
        return str(error)


_DIGITS = st.text("0123456789", min_size=1, max_size=42)
_UNITS = ["", "B", "kB", *(p + u for p in "KMGTkmgt" for u in ("", "B", "b", "iB", "IB", "ib", "Ib", "i")), "abc"]


@settings(derandomize=True)
@given(
    st.one_of(
        st.builds(
            "".join,
            st.tuples(
                st.sampled_from(["", "-", "+", " ", "\t\n"]),
                _DIGITS,
                st.one_of(st.just(""), _DIGITS.map(".{}".format)),
                st.sampled_from(["", " ", " \t", "\n"]),
                st.sampled_from(_UNITS),
                st.sampled_from(["", " ", "\r\x1f", "2"]),
            ),
        ),
        st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=100),
        st.text("'\"\\\n8GiB .-", max_size=12),
    )
)
def test_the_core_reads_amounts_in_the_same_way_and_refuses_them_in_the_same_words(text: str) -> None:
    assert of_core(text) == of_python(text)


@pytest.mark.parametrize("text", ["9223372036854775807", "9223372036854775808", "8796093022207.99999MiB", "9" * 41])
def test_the_core_knows_the_largest_amount(text: str) -> None:
    assert of_core(text) == of_python(text)
