"""How long steps that read weights in host memory take, and keep copies off the link."""

from __future__ import annotations

from penstock.plan.simulator import InPlace

LINK = 50.0


def test_a_step_that_waits_for_its_reads_has_the_link_to_itself() -> None:
    """At its own rate, not at that of copies, which is higher."""
    assert InPlace(nbytes=100, of_bytes=100).link_s(1.0, 4.0, LINK) == 4.0


def test_of_a_split_weight_only_the_part_that_is_read_there() -> None:
    split = InPlace(nbytes=50, of_bytes=100, is_split=True)
    assert split.link_s(1.0, 4.0, LINK) == 2.0 == split.step_s(1.0, 4.0)


def test_a_step_that_computes_longer_than_it_reads_leaves_the_rest_to_copies() -> None:
    assert InPlace(nbytes=100, of_bytes=100).link_s(3.0, 3.0, LINK) == 2.0


def test_a_step_without_such_reads_takes_nothing_of_the_link() -> None:
    assert InPlace(of_bytes=100).link_s(1.0, 4.0, LINK) == 0.0
    assert InPlace(of_bytes=100).step_s(1.0, 4.0) == 1.0
