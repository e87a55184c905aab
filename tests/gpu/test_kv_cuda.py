"""The split KV cache on a GPU: kernels that read registered host memory in place, against fp64."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from examples import decoder
from torch import Tensor

from penstock.kv import HostKVCache, KVCacheFullError, ops
from penstock.kv.failures import KVCacheInputError
from penstock.kv.layout import workspace_bound_bytes
from tests.kv.decoder import SplitDecoder, cache_of, generate, generate_plain
from tests.kv.exact import Ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [1500, 7, 900]


def cache_for(tokens: Ragged, near: int, *, max_length: int = 2048, host_programs: int = 4) -> HostKVCache:
    """One layer, whose cap holds `near` positions of each sequence; everything unwritten is NaN."""
    batch, kv_heads, _, head_dim = tokens.k.shape
    cache = HostKVCache(
        layers=1,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=max_length,
        device_cap_bytes=near * batch * 2 * kv_heads * head_dim * tokens.k.dtype.itemsize,
        dtype=tokens.k.dtype,
        device="cuda",
        host_programs=host_programs,
    )
    assert cache.split.device_positions == near
    for side in cache.buffers():
        side.fill_(torch.nan)
    torch.cuda.synchronize()
    return cache


def feed(cache: HostKVCache, tokens: Ragged, amount: int) -> tuple[Tensor, list[int], list[int]]:
    starts = list(cache.lengths)
    q, k, v, counts = tokens.chunk(starts, amount)
    step = cache.begin(counts)
    return cache(0, q, k, v, step.starts, step.counts), starts, counts


@pytest.mark.parametrize("near", [0, 64, 512, 1472, 2048])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "head_dim"),
    [
        (torch.bfloat16, 8, 4, 128),
        (torch.bfloat16, 1, 8, 256),
        (torch.float16, 4, 1, 64),
        (torch.float16, 2, 5, 80),
        (torch.float32, 2, 2, 128),
    ],
)
def test_attention_over_both_sides(dtype: torch.dtype, kv_heads: int, group: int, head_dim: int, near: int) -> None:
    """A long chunk, a short one, tokens: staged, and read in place. Poison beyond every length, on both sides."""
    tokens = Ragged(kv_heads=kv_heads, group=group, head_dim=head_dim, lengths=LENGTHS, dtype=dtype, device="cuda")
    cache = cache_for(tokens, near)
    for amount in (1300, 190, 3, 1, 1, 5):
        out, starts, counts = feed(cache, tokens, amount)
        tokens.check(out, starts, counts)
    assert list(cache.lengths) == LENGTHS


@pytest.mark.parametrize("host_programs", [1, 2, 8, 64])
def test_any_number_of_programs_towards_the_host(host_programs: int) -> None:
    tokens = Ragged(kv_heads=4, group=4, head_dim=128, lengths=LENGTHS, dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 320, host_programs=host_programs)
    for amount in (1499, 1):
        out, starts, counts = feed(cache, tokens, amount)
        tokens.check(out, starts, counts)


def test_appends_go_to_the_right_side_and_nowhere_else() -> None:
    tokens = Ragged(kv_heads=2, group=1, head_dim=128, lengths=LENGTHS, dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 640)
    for amount in (639, 2, 1, 858):
        feed(cache, tokens, amount)
    torch.cuda.synchronize()
    for index, whole in enumerate((tokens.k, tokens.v)):
        for b, length in enumerate(LENGTHS):
            for side, expected in (("kv_0", whole[b, :, : min(length, 640)]), ("host_kv_0", whole[b, :, 640:length])):
                lines = cache.get_buffer(side)[index, b]
                assert torch.equal(lines[:, : expected.shape[1]].cpu(), expected.cpu())
                assert lines[:, expected.shape[1] :].isnan().all()


def test_the_same_bits_every_time() -> None:
    """With the link busy otherwise, too: when a read arrives must not matter."""
    tokens = Ragged(kv_heads=8, group=4, head_dim=128, lengths=LENGTHS, dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 384)
    feed(cache, tokens, 1499)
    q, k, v, counts = tokens.chunk(list(cache.lengths), 1)
    step = cache.begin(counts)
    first = cache(0, q, k, v, step.starts, step.counts)
    noise = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    other = torch.cuda.Stream()
    for turn in range(100):
        if turn % 2:
            with torch.cuda.stream(other):
                noise.cuda(non_blocking=True)
        assert torch.equal(cache(0, q, k, v, step.starts, step.counts), first)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "head_dim"),
    [(torch.bfloat16, 8, 4, 128), (torch.float16, 2, 5, 80), (torch.float32, 2, 2, 128)],
)
def test_the_same_bits_wherever_the_sides_meet(dtype: torch.dtype, kv_heads: int, group: int, head_dim: int) -> None:
    """Staged chunks and tokens; the far side read by any number of programs."""
    tokens = Ragged(kv_heads=kv_heads, group=group, head_dim=head_dim, lengths=LENGTHS, dtype=dtype, device="cuda")
    found: list[list[Tensor]] = []
    for near, programs in ((0, 16), (64, 1), (512, 4), (960, 16), (1472, 64), (2048, 4)):
        cache = cache_for(tokens, near, host_programs=programs)
        found.append([feed(cache, tokens, amount)[0] for amount in (1300, 190, 3, 1, 1, 5)])
    for outs in found:
        assert all(torch.equal(out, wanted) for out, wanted in zip(outs, found[0], strict=True))


def test_what_was_just_appended_is_seen_without_a_wait() -> None:
    """All of it far: keys go out over the link in one kernel and come back in the next, three hundred times."""
    tokens = Ragged(kv_heads=8, group=4, head_dim=128, lengths=[300], dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 0, max_length=300)
    outs = [feed(cache, tokens, 1) for _ in range(300)]
    for out, starts, counts in outs:
        tokens.check(out, starts, counts)


def test_the_cap_is_kept_and_the_far_side_takes_no_device_memory() -> None:
    cap = 40 * 2**20 + 4321

    def make() -> HostKVCache:
        return HostKVCache(
            layers=4, batch=2, kv_heads=8, head_dim=128, max_length=16384, device_cap_bytes=cap, device="cuda"
        )

    make()  # kernels are loaded once: tens of MiB that no cache takes
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    cache = make()
    taken = torch.cuda.memory_allocated() - before
    assert taken == cache.device_bytes <= cap < cache.device_bytes + 2 * 64 * cache.shape.position_bytes
    assert cache.host_bytes > 400 * 2**20
    # Registering takes page tables; the far side itself would be ten times the cap.
    assert free - torch.cuda.mem_get_info()[0] < 2 * cap
    assert all(cache.get_buffer(f"host_kv_{layer}").is_pinned() for layer in range(4))


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_what_attention_allocates_is_within_its_bound(tokens: int) -> None:
    """Decoding, a chunk that reads the far side in place, and one for which it is staged."""
    cache = HostKVCache(
        layers=1, batch=2, kv_heads=4, head_dim=128, max_length=9000, device_cap_bytes=8 * 2**20, device="cuda"
    )
    step = cache.begin(6000)
    del step
    step = cache.begin(tokens)
    q = torch.randn(2, 12, tokens, 128, device="cuda", dtype=torch.bfloat16)
    arguments = q, cache.kv_0, cache.host_kv_0, step.starts, step.counts, 0.1, cache.host_programs
    ops.ATTEND(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ops.ATTEND(*arguments)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before - out.nbytes
    bound = workspace_bound_bytes(
        batch=2,
        heads=12,
        kv_heads=4,
        tokens=tokens,
        head_dim=128,
        element_bytes=2,
        capacity=cache.split.capacity,
    )
    # The allocator rounds each of three tensors up to 512 bytes.
    assert 0 < taken <= bound + 3 * 512


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_registrations_end_with_their_caches() -> None:
    """Ending one that has ended already, or is not there, would be an error."""
    for _ in range(20):
        cache = HostKVCache(
            layers=2, batch=1, kv_heads=8, head_dim=128, max_length=16384, device_cap_bytes=0, device="cuda"
        )
        far = cache.host_kv_1
        del cache
        gc.collect()
        assert far.is_pinned(), "a view keeps its memory registered"
        del far
        gc.collect()


def test_a_length_that_does_not_fit() -> None:
    tokens = Ragged(kv_heads=2, group=2, head_dim=64, lengths=[20, 20], dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 64, max_length=72)
    for side in cache.buffers():
        side.fill_(1.0)
    q, k, v, _ = tokens.chunk([0, 0], 4)
    step = cache.begin([4, 4])
    cache(0, q, k, v, step.starts, step.counts)
    with pytest.raises(KVCacheFullError, match="sequence 0 .* 73 positions long; it holds 72"):
        cache.begin([69, 1])
    # The op itself cannot look at lengths without a wait: the sequence that does not fit is NaN, the other is right.
    out = cache(0, q, k, v, torch.tensor([69, 4]).cuda(), torch.tensor([4, 4]).cuda())
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_memory_that_is_not_registered_is_refused() -> None:
    numbers = torch.ones(1, dtype=torch.int32, device="cuda")
    near = torch.zeros(2, 1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(KVCacheInputError, match="not registered with cuda"):
        ops.ATTEND(near[0], near, near.cpu(), numbers, numbers, 1.0, 2)


def test_moving_to_the_gpu_keeps_the_content() -> None:
    tokens = Ragged(kv_heads=2, group=2, head_dim=64, lengths=[200], dtype=torch.float32)
    cache = HostKVCache(
        layers=1, batch=1, kv_heads=2, head_dim=64, max_length=256, device_cap_bytes=90_000, dtype=torch.float32
    )
    q, k, v, counts = tokens.chunk([0], 199)
    step = cache.begin(counts)
    cache(0, q, k, v, step.starts, step.counts)
    cache.cuda()
    assert cache.kv_0.is_cuda and not cache.host_kv_0.is_cuda and cache.host_kv_0.is_pinned()
    q, k, v, counts = tokens.chunk([199], 1)
    step = cache.begin(counts)
    out = cache(0, q.cuda(), k.cuda(), v.cuda(), step.starts, step.counts)
    tokens.check(out.cpu(), [199], counts)


def test_a_captured_step_follows_the_lengths() -> None:
    """One graph for every length: nothing about it is known on the host."""
    tokens = Ragged(kv_heads=8, group=4, head_dim=128, lengths=[700, 30], dtype=torch.bfloat16, device="cuda")
    cache = cache_for(tokens, 384)
    feed(cache, tokens, 380)
    q, k, v, counts = tokens.chunk(list(cache.lengths), 1)
    starts = torch.tensor(cache.lengths, dtype=torch.int32, device="cuda")
    amounts = torch.zeros(2, dtype=torch.int32, device="cuda")
    # Compiled before the capture, where loading a kernel is not allowed; without tokens, so that nothing is written.
    cache(0, q, k, v, starts, amounts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache(0, q, k, v, starts, amounts)
    while cache.lengths[0] < 700:
        held = list(cache.lengths)
        new_q, new_k, new_v, counts = tokens.chunk(held, 1)
        step = cache.begin(counts)
        for fixed, new in zip((q, k, v, starts, amounts), (new_q, new_k, new_v, step.starts, step.counts), strict=True):
            fixed.copy_(new)
        graph.replay()
        if held[0] % 40 == 0 or 395 < held[0] < 405:
            tokens.check(out, held, counts)


@pytest.mark.parametrize("near", [0, 9, 17, 40])
def test_a_decoder_generates_the_same_tokens(near: int) -> None:
    cfg = dataclasses.replace(decoder.TINY, max_len=40)
    plain = decoder.build(cfg, cached=True, seed=1).cuda()
    prompts = [[3, 77, 120, 5, 9, 31, 200, 14, 15], [250, 1], [60, 61, 62, 63, 9]]
    expected = [generate_plain(plain, prompt, 16) for prompt in prompts]
    found = generate(SplitDecoder(plain, cache_of(cfg, len(prompts), near, device="cuda")), prompts, 16, chunk=4)
    assert [tokens[:16] for tokens in found] == expected
