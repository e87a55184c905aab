import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Nothing is asserted about time: a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# What a shell starts in the background ignores interrupts, and hands that on. Tests send themselves some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def products_stay_what_they_were() -> Iterator[None]:
    """Where a CPU cannot multiply bfloat16, torch's first attempt turns oneDNN off for good, and with it the bits of
    every product: results that were kept from before would differ from those after."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
