"""Which method runs which tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.methods import Methods, Piece, pieces

DENSE = Methods(batch=1, cache_length=100, decode_tokens=4, prefill_tokens=10)
FIXED = Methods(batch=1, cache_length=100, decode_tokens=1, prefill_tokens=8, is_fixed=True, takes_padding=False)
SINGLE = Methods(batch=1, cache_length=100, decode_tokens=1, prefill_tokens=0, is_fixed=True, takes_padding=False)


def _told(methods: Methods, count: int, wanted: int) -> list[tuple[str, int]]:
    return [(piece.method, piece.end - piece.begin) for piece in pieces(methods, count, wanted)]


@pytest.mark.parametrize(
    ("methods", "count", "wanted", "expected"),
    [
        (DENSE, 1, 1, [("decode", 1)]),
        (DENSE, 4, 1, [("decode", 4)]),
        (DENSE, 5, 1, [("prefill", 5)]),
        (DENSE, 23, 1, [("prefill", 10), ("prefill", 10), ("decode", 3)]),
        # A prompt and two candidates: the prompt runs as it would without them.
        (DENSE, 25, 3, [("prefill", 10), ("prefill", 10), ("decode", 3), ("decode", 2)]),
        (DENSE, 6, 6, [("decode", 4), ("decode", 2)]),
        (FIXED, 19, 1, [("chunk", 8), ("chunk", 8), ("decode", 1), ("decode", 1), ("decode", 1)]),
        (SINGLE, 3, 1, [("decode", 1)] * 3),
    ],
)
def test_pieces(methods: Methods, count: int, wanted: int, expected: list[tuple[str, int]]) -> None:
    assert _told(methods, count, wanted) == expected


@given(st.sampled_from([DENSE, FIXED, SINGLE]), st.integers(1, 60), st.data())
def test_every_token_once_and_every_wanted_logit(methods: Methods, count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, count))
    made = list(pieces(methods, count, wanted))
    assert [made[0].begin, *(piece.end for piece in made)] == [0, *(piece.begin for piece in made[1:]), count]
    logits = sum(piece.end - piece.begin if piece.method == "decode" else 1 for piece in made)
    assert logits >= wanted
    # A prefill gives its last token's logits alone: what is wanted must not lie inside of one.
    for piece in made:
        if piece.method != "decode":
            assert piece.end - 1 <= count - wanted
            assert piece.end - piece.begin <= methods.prefill_tokens


@given(st.integers(1, 40), st.integers(1, 8))
def test_candidates_leave_the_prompt_alone(prompt: int, candidates: int) -> None:
    alone = list(pieces(DENSE, prompt, 1))
    both = list(pieces(DENSE, prompt + candidates, candidates + 1))
    assert both[: len(alone)] == alone or prompt == 1
    assert all(piece.method == "decode" for piece in both[len(alone) :])


def test_padding_has_its_slots() -> None:
    assert (DENSE.slots, FIXED.slots) == (103, 100)
    assert Piece("decode", 0, 1).end == 1
