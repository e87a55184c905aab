"""A KV cache that lies partly in device memory and partly in host memory, and attention that reads both in one step.

cache = HostKVCache(layers=32, batch=1, kv_heads=8, head_dim=128, max_length=131072, device_cap_bytes=2 * 2**30)
step = cache.begin(tokens)                       # refuses what does not fit; says what will cross the link
y = cache(layer, q, k, v, step.starts, step.counts)
"""

from penstock.kv.cache import HostKVCache, Step
from penstock.kv.failures import KVCacheCapError, KVCacheFullError
from penstock.kv.split import CacheShape, Split, StepTraffic, split_within, step_traffic

__all__ = [
    "CacheShape",
    "HostKVCache",
    "KVCacheCapError",
    "KVCacheFullError",
    "Split",
    "Step",
    "StepTraffic",
    "split_within",
    "step_traffic",
]
