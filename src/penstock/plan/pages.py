"""The pages that device memory is taken in. Export, load and the command line must count with the same ones."""

from __future__ import annotations

# What every NVIDIA driver so far answers for memory that can be mapped. Load asks the driver itself.
CUDA_PAGE_BYTES = 2 << 20

_SOFT_PAGE_BYTES = 4096
# A plan handles memory page by page; this many keep planning quick, and rounding below a part in ten thousand.
_SOFT_PAGES = 16384
_LARGEST_SOFT_PAGE_BYTES = 2 << 20


def soft_page_bytes(weight_bytes: int) -> int:
    """Of the soft driver, which stands in for a device where programs run on the CPU."""
    page_bytes = _SOFT_PAGE_BYTES
    while page_bytes < _LARGEST_SOFT_PAGE_BYTES and weight_bytes > page_bytes * _SOFT_PAGES:
        page_bytes *= 2
    return page_bytes


def page_bytes_on(device: str, weight_bytes: int) -> int:
    """`device` is a type, "cpu" or "cuda"; `weight_bytes` is what all weights of the program take."""
    return CUDA_PAGE_BYTES if device == "cuda" else soft_page_bytes(weight_bytes)
