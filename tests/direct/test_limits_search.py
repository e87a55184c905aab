"""Limits by measured times: which of the trials is taken. The measuring itself runs in tests/gpu."""

from __future__ import annotations

from penstock.direct.launch_shape import Limits
from penstock.direct.limits_search import Trial, choose_limits


def trial(host_ctas: int, kib: int, host_s: float, balanced_s: float) -> Trial:
    return Trial(Limits(host_ctas=host_ctas, host_inflight_bytes=kib << 10), host_s, balanced_s)


def test_slow_reads_of_the_host_are_never_taken() -> None:
    starved = trial(1, 32, host_s=1.2, balanced_s=0.5)
    busy = trial(4, 256, host_s=1.0, balanced_s=0.9)
    assert choose_limits([starved, busy]) == busy.limits


def test_of_those_that_keep_the_link_busy_the_one_that_leaves_hbm_alone() -> None:
    crowded = trial(8, 1024, host_s=0.995, balanced_s=1.4)
    modest = trial(4, 256, host_s=1.0, balanced_s=1.0)
    assert choose_limits([crowded, modest]) == modest.limits


def test_of_equals_the_least() -> None:
    trials = [trial(8, 512, 1.0, 1.0), trial(2, 128, 1.005, 1.005), trial(4, 256, 1.0, 0.999)]
    assert choose_limits(trials) == trials[1].limits
