"""The cache as a module, on the CPU: attention against fp64, appends, lengths, refusals, moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kv import HostKVCache, KVCacheFullError, ops
from penstock.kv.failures import KVCacheInputError
from tests.kv import exact
from tests.kv.exact import Ragged

LENGTHS = [137, 5, 72]


def cache_for(tokens: Ragged, near: int, *, layers: int = 1, max_length: int = 140) -> HostKVCache:
    """A cache whose cap holds `near` positions of each sequence; everything unwritten is NaN."""
    batch, kv_heads, _, head_dim = tokens.k.shape
    column = layers * batch * 2 * kv_heads * head_dim * tokens.k.dtype.itemsize
    cache = HostKVCache(
        layers=layers,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=max_length,
        device_cap_bytes=near * column,
        dtype=tokens.k.dtype,
    )
    assert cache.split.device_positions == near
    for side in cache.buffers():
        side.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("near", [0, 64, 128, 140])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_over_both_sides(dtype: torch.dtype, group: int, near: int) -> None:
    """Prefill in ragged chunks, then token by token, at every step against fp64. Poison beyond every length."""
    tokens = Ragged(kv_heads=2, group=group, head_dim=24, lengths=LENGTHS, dtype=dtype)
    cache = cache_for(tokens, near)
    for amount in (57, 7, 1, 1, 61, 1, 1, 1, 6, 1):
        starts = list(cache.lengths)
        q, k, v, counts = tokens.chunk(starts, amount)
        step = cache.begin(counts)
        tokens.check(cache(0, q, k, v, step.starts, step.counts), starts, counts)
    assert list(cache.lengths) == LENGTHS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_bits_wherever_the_sides_meet(dtype: torch.dtype) -> None:
    """Chunks and tokens, at six splits and beyond: what is far is only elsewhere."""
    lengths = [330, 5, 200]
    tokens = Ragged(kv_heads=2, group=3, head_dim=24, lengths=lengths, dtype=dtype)
    found: dict[int, list[Tensor]] = {}
    for near in (0, 64, 128, 192, 256, 320, 340):
        cache = cache_for(tokens, near, max_length=340)
        found[near] = []
        for amount in (190, 1, 130, 1, 8):
            q, k, v, counts = tokens.chunk(list(cache.lengths), amount)
            step = cache.begin(counts)
            found[near].append(cache(0, q, k, v, step.starts, step.counts))
    for outs in found.values():
        assert all(torch.equal(out, wanted) for out, wanted in zip(outs, found[0], strict=True))


def test_the_tolerance_that_is_stated_is_the_one_that_is_tested() -> None:
    assert ops.TOLERANCE == exact.TOLERANCE


def test_appends_go_to_the_right_side_and_nowhere_else() -> None:
    tokens = Ragged(kv_heads=2, group=1, head_dim=8, lengths=LENGTHS, dtype=torch.float32)
    cache = cache_for(tokens, 64)
    for amount in (63, 3, 1, 70):
        q, k, v, counts = tokens.chunk(list(cache.lengths), amount)
        step = cache.begin(counts)
        cache(0, q, k, v, step.starts, step.counts)
    for index, whole in enumerate((tokens.k, tokens.v)):
        for b, length in enumerate(LENGTHS):
            for side, expected in (("kv_0", whole[b, :, : min(length, 64)]), ("host_kv_0", whole[b, :, 64:length])):
                lines = cache.get_buffer(side)[index, b]
                assert torch.equal(lines[:, : expected.shape[1]], expected)
                assert lines[:, expected.shape[1] :].isnan().all()


def test_layers_are_apart() -> None:
    tokens = Ragged(kv_heads=2, group=2, head_dim=8, lengths=[12, 3], dtype=torch.float32)
    cache = cache_for(tokens, 0, layers=2)
    q, k, v, counts = tokens.chunk([0, 0], 12)
    step = cache.begin(counts)
    first = cache(0, q, k, v, step.starts, step.counts)
    second = cache(1, q, -k, -v, step.starts, step.counts)
    tokens.check(first, [0, 0], counts)
    exact.check(second[0], q[0], -k[0], -v[0], 0)
    q, k, v, counts = tokens.chunk([0, 0], 1)
    step = cache.begin([1, 0])
    third = cache(0, q, k, v, step.starts, step.counts)
    exact.check(third[0], q[0], torch.cat((tokens.k[0], k[0]), 1), torch.cat((tokens.v[0], v[0]), 1), 12)


def test_what_is_reported() -> None:
    cache = HostKVCache(
        layers=2, batch=2, kv_heads=2, head_dim=8, max_length=100, device_cap_bytes=20_000, dtype=torch.float16
    )
    position = 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, dims, bytes
    assert cache.split.device_positions == 64 < 20_000 // (2 * position) == 78
    near = sum(cache.get_buffer(f"kv_{layer}").nbytes for layer in range(2))
    far = sum(cache.get_buffer(f"host_kv_{layer}").nbytes for layer in range(2))
    assert (cache.device_bytes, cache.host_bytes) == (near, far) == (64 * 2 * position, 36 * 2 * position)
    assert near <= cache.device_cap_bytes
    assert cache.begin(55).traffic.link_read_bytes == 0
    traffic = cache.begin([12, 1]).traffic
    assert (traffic.link_read_bytes, traffic.link_written_bytes) == (3 * position, 3 * position)
    assert traffic.device_read_bytes == (64 + 56) * position
    assert cache.begin([0, 0]).traffic.link_read_bytes == 0


def test_a_length_that_does_not_fit_is_refused_by_name() -> None:
    tokens = Ragged(kv_heads=1, group=1, head_dim=8, lengths=[3, 9], dtype=torch.float32)
    cache = cache_for(tokens, 64, max_length=68)
    cache.begin([3, 68])
    with pytest.raises(
        KVCacheFullError, match="sequence 1 .* 69 positions long; it holds 68, 64 of them on the dev"
    ) as got:
        cache.begin([1, 1])
    assert (got.value.sequence, got.value.length, got.value.capacity) == (1, 69, 68)
    assert cache.lengths == (3, 68), "nothing was appended"
    cache.begin([5, 0])


def test_the_ops_refuse_a_length_that_does_not_fit() -> None:
    tokens = Ragged(kv_heads=1, group=1, head_dim=8, lengths=[4], dtype=torch.float32)
    cache = cache_for(tokens, 64, max_length=68)
    q, k, v, _ = tokens.chunk([0], 4)
    before = cache.host_kv_0.clone()
    with pytest.raises(KVCacheFullError, match="would be 69 positions long; it holds 68"):
        cache(0, q, k, v, torch.tensor([65]), torch.tensor([4]))
    assert torch.equal(cache.host_kv_0.isnan(), before.isnan())


def test_truncate_takes_tokens_back() -> None:
    """The other continuation of a prefix: what was appended after it leaves no trace, on either side."""
    tokens = Ragged(kv_heads=2, group=2, head_dim=16, lengths=[90], dtype=torch.float32)
    cache = cache_for(tokens, 64)
    q, k, v, counts = tokens.chunk([0], 80)
    step = cache.begin(counts)
    cache(0, q, k, v, step.starts, step.counts)
    step = cache.begin(9)
    cache(0, q[:, :, :9], k[:, :, :9] * 5, v[:, :, :9] * 5, step.starts, step.counts)
    cache.truncate([80])
    q, k, v, counts = tokens.chunk([80], 10)
    step = cache.begin(counts)
    tokens.check(cache(0, q, k, v, step.starts, step.counts), [80], counts)
    with pytest.raises(KVCacheInputError, match=r"lengths \[91\] are not prefixes of \[90\]"):
        cache.truncate([91])


def test_moving_keeps_the_content_and_the_far_side_on_the_host() -> None:
    tokens = Ragged(kv_heads=2, group=2, head_dim=16, lengths=[9], dtype=torch.float32)
    cache = cache_for(tokens, 64)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), cache)
    assert model.to("cpu", torch.float32)[1].kv_0.data_ptr() == cache.kv_0.data_ptr()
    model.to("meta")
    assert {side.device.type for side in cache.buffers()} == {"meta"}
    with pytest.raises(KVCacheInputError, match=r"torch.float32 cannot become one of torch.float16"):
        model.half()
    model.to_empty(device="cpu")
    assert cache.device.type == "cpu" and cache.host_kv_0.device.type == "cpu" and not cache.host_kv_0.any()


def test_the_cache_is_no_part_of_a_checkpoint() -> None:
    cache = cache_for(Ragged(kv_heads=1, group=1, head_dim=8, lengths=[4], dtype=torch.float32), 64)
    assert not cache.state_dict() and not list(cache.parameters())


def inputs(**changes: Tensor) -> dict[str, Tensor]:
    plain = dict(
        q=torch.zeros(2, 4, 3, 8),
        device_kv=torch.zeros(2, 2, 2, 64, 8),
        host_kv=torch.zeros(2, 2, 2, 7, 8),
        starts=torch.zeros(2, dtype=torch.int32),
        counts=torch.full((2,), 3),
    )
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=torch.zeros(2, 4, 3, 8, dtype=torch.float16)), "tokens are torch.float16, the KV cache torch.float32"),
        (dict(q=torch.zeros(2, 3, 3, 8)), "3 heads over 2 kv_heads"),
        (dict(q=torch.zeros(2, 4, 3, 16)), r"\(2, 2, kv_heads, positions, 16\)"),
        (dict(q=torch.zeros(2, 4, 3, 136)), "head_dim of at most 128 for torch.float32"),
        (dict(q=torch.zeros(4, 3, 8)), r"shape \(4, 3, 8\); they must be"),
        (dict(host_kv=torch.zeros(2, 2, 4, 7, 8)), "4 on the host"),
        (dict(device_kv=torch.zeros(2, 2, 2, 5, 8)), "5 positions on the device and 7 on the host; the first must be"),
        (dict(host_kv=torch.zeros(2, 2, 2, 8, 7).transpose(3, 4)), "host side has strides"),
        (dict(starts=torch.zeros(3, dtype=torch.int32)), r"starts is torch.int32 of shape \(3,\)"),
        (dict(counts=torch.zeros(2)), "counts is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(KVCacheInputError, match=message):
        ops.ATTEND(**inputs(**changes), scale=1.0, host_programs=1)


def test_keys_and_values_must_agree() -> None:
    given = inputs()
    del given["q"]
    with pytest.raises(KVCacheInputError, match=r"keys are \(2, 2, 3, 8\).* values \(2, 2, 2, 8\)"):
        ops.APPEND(k=torch.zeros(2, 2, 3, 8), v=torch.zeros(2, 2, 2, 8), **given)


def test_malformed_caches_are_refused() -> None:
    sizes = dict(layers=1, batch=1, kv_heads=1, head_dim=8, max_length=4, device_cap_bytes=0)
    with pytest.raises(KVCacheInputError, match="a KV cache of torch.int8"):
        HostKVCache(**sizes, dtype=torch.int8)
    with pytest.raises(KVCacheInputError, match="host_programs is 0"):
        HostKVCache(**sizes, host_programs=0)
    with pytest.raises(KVCacheInputError, match=r"counts are \[1, 1\]; a cache of 1 sequences"):
        HostKVCache(**sizes).begin([1, 1])
