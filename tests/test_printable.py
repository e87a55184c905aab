"""What a terminal would act upon is shown as an escape; everything else is shown as it is."""

import pytest

from penstock.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größe 重み 🙂", "größe 重み 🙂"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\tc\rd\x00", r"a\x0ab\x09c\x0dd\x00"),
        ("\x7f\x9b31m", r"\x7f\x9b31m"),
        ("abc\u202etxt.exe\u2066", r"abc\u202etxt.exe\u2066"),
        ("\ud800half", r"\ud800half"),
        (r"a back\slash", r"a back\slash"),
    ],
)
def test_only_what_a_terminal_acts_upon_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_character_can_be_encoded_and_none_is_a_control() -> None:
    shown = printable("".join(map(chr, range(0x11_0000))))
    shown.encode()
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in shown)
