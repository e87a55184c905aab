"""Which states are the host side of a KV cache, and what cannot be kept on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import penstock
from penstock.errors import UnsupportedProgramError
from penstock.export.catalog import build_catalog, state_names
from penstock.export.host_states import host_states, split_at_load
from penstock.export.kv_workspace import kv_workspace_bound_bytes
from penstock.export.weightless import WeightlessProgram, make_weightless
from penstock.kv import HostKVCache, ops
from penstock.kv.layout import workspace_bound_bytes

CUDA = torch.device("cuda", 0)
STARTS, COUNTS = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
Q, K = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)


class Cached(nn.Module):
    """One layer of attention with a weight before it; in two methods, one of which only reads the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
        self.cache = HostKVCache(
            layers=1, batch=1, kv_heads=2, head_dim=8, max_length=70, device_cap_bytes=9000, dtype=torch.float32
        )

    def forward(self, q: Tensor, k: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        return self.cache(0, q * self.weight, k, k, starts, counts)


class Reading(Cached):
    def forward(self, q: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        device_kv, host_kv = self.cache.kv_0, self.cache.host_kv_0
        return ops.ATTEND(q * self.weight, device_kv, host_kv, starts, counts, 0.5, 2)


class Packed(nn.Module):
    """Both sides of both layers are views of buffers of its own, and what is attended to was written before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("near", torch.zeros(2, 2, 1, 2, 64, 8), persistent=False)
        self.register_buffer("far", torch.zeros(2, 2 * 2 * 5 * 8), persistent=False)

    def forward(self, q: Tensor, k: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        for layer in range(2):
            near, far = self.near[layer], self.far[layer].view(2, 1, 2, 5, 8)
            ops.APPEND(near, far, k, k, starts, counts)
            q = ops.ATTEND(q * self.weight, near, far, starts, counts, 0.5, 2)
        return q


class Lent(nn.Module):
    """The host side is not the model's, or not a buffer at all."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("near", torch.zeros(2, 1, 2, 64, 8), persistent=False)

    def forward(self, q: Tensor, far: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        self.near.add_(1)
        far = far * 2 if self.copied else far
        return ops.ATTEND(q * self.weight, self.near, far, starts, counts, 0.5, 2)


def offloaded(model: nn.Module, *arguments: Tensor) -> ExportedProgram:
    with torch.no_grad():
        return penstock.apply_weight_offload(torch.export.export(model, (*arguments, STARTS, COUNTS)))


def for_cuda(ep: ExportedProgram) -> WeightlessProgram:
    return make_weightless(ep, CUDA, state_names({"forward": ep}))


def test_the_host_side_and_no_other_state_is_marked() -> None:
    catalog = build_catalog({"forward": offloaded(Cached(), Q, K)})
    assert {name: state.host for name, state in catalog.states.items()} == {
        "cache.kv_0": False,
        "cache.host_kv_0": True,
    }


@pytest.mark.parametrize("order", [("append", "read"), ("read", "append")])
def test_a_method_that_only_reads_marks_the_state_of_the_other(order: tuple[str, str]) -> None:
    model = Cached()
    reading = Reading()
    reading.cache, reading.weight = model.cache, model.weight
    both = {"append": offloaded(model, Q, K), "read": offloaded(reading, Q)}
    assert host_states(both["read"]) == {"cache.host_kv_0"}
    catalog = build_catalog({name: both[name] for name in order})
    assert [name for name, state in catalog.states.items() if state.host] == ["cache.host_kv_0"]
    make_weightless(both["read"], CUDA, state_names(both))


def test_views_lead_back_to_the_buffer() -> None:
    ep = offloaded(Packed(), Q, K)
    assert host_states(ep) == {"far"}
    assert for_cuda(ep).states == ("near", "far")


def test_a_cache_that_only_our_ops_take_can_be_split_at_load() -> None:
    catalog = build_catalog({"forward": offloaded(Cached(), Q, K)})
    assert {name: state.near for name, state in catalog.states.items()} == {
        "cache.kv_0": None,
        "cache.host_kv_0": "cache.kv_0",
    }
    model, reading = Cached(), Reading()
    reading.cache, reading.weight = model.cache, model.weight
    both = {"read": offloaded(reading, Q), "append": offloaded(model, Q, K)}
    assert split_at_load(both) == {"cache.host_kv_0": "cache.kv_0"}


@pytest.mark.parametrize("kind", ["views", "near read", "far read", "near written", "far returned", "two near sides"])
def test_one_that_something_else_takes_cannot(kind: str) -> None:
    class Peeking(Cached):
        def forward(self, q: Tensor, k: Tensor, starts: Tensor, counts: Tensor) -> Any:
            near, far = self.cache.kv_0, self.cache.host_kv_0
            if kind == "near written":
                near.add_(1)
            out = self.cache(0, q * self.weight, k, k, starts, counts)
            if kind == "near read":
                return out + near.sum()
            if kind == "far read":
                return out + far[:, :, :, :1].sum()
            if kind == "far returned":
                return out, far
            if kind == "two near sides":
                return out + ops.ATTEND(q, self.other, far, starts, counts, 0.5, 2)
            return out

    model: nn.Module = Packed() if kind == "views" else Peeking()
    model.register_buffer("other", torch.zeros(2, 1, 2, 64, 8), persistent=False)
    ep = offloaded(model, Q, K)
    assert split_at_load({"forward": ep}) == {}
    # And so not if it is fine in another method.
    if kind != "views":
        plain = Cached()
        plain.cache, plain.weight = model.cache, model.weight
        fine = offloaded(plain, Q, K)
        assert split_at_load({"fine": fine}) != {}
        assert split_at_load({"fine": fine, "forward": ep}) == split_at_load({"forward": ep, "fine": fine}) == {}


def test_nor_one_that_a_method_without_attention_reads() -> None:
    class Summing(Cached):
        def forward(self, q: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
            return self.cache.host_kv_0.sum() + (q * self.weight).sum() + starts + counts

    model, other = Cached(), Summing()
    other.cache, other.weight = model.cache, model.weight
    both = {"append": offloaded(model, Q, K), "sum": offloaded(other, Q)}
    assert split_at_load(both) == {}
    assert {state.near for state in build_catalog(both).states.values()} == {None}


def test_to_a_program_for_a_gpu_everything_is_on_it() -> None:
    program = for_cuda(offloaded(Cached(), Q, K))
    assert program.states == ("cache.kv_0", "cache.host_kv_0")
    values: list[Any] = [node.meta["val"] for node in program.module.graph.nodes if "val" in node.meta]
    tensors = [value for value in values if isinstance(value, Tensor)]
    assert len(tensors) > len(program.example_inputs) and {tensor.device for tensor in tensors} == {CUDA}


@pytest.mark.parametrize(("copied", "name"), [(False, "far"), (True, "mul")])
def test_a_host_side_that_is_no_buffer_is_refused_for_a_gpu(copied: bool, name: str) -> None:
    ep = offloaded(Lent(copied=copied), Q, torch.zeros(2, 1, 2, 5, 8))
    with pytest.raises(UnsupportedProgramError, match=f"penstock::kv_attend at .* is '{name}', which is no buffer"):
        for_cuda(ep)
    assert make_weightless(ep, torch.device("cpu"), frozenset({"near"})).states == ("near",)


def test_a_host_side_that_nothing_writes_is_refused_for_a_gpu() -> None:
    with pytest.raises(UnsupportedProgramError, match="'cache.host_kv_0', is written by no method"):
        for_cuda(offloaded(Reading(), Q))


def test_attention_inside_control_flow_is_refused_for_a_gpu() -> None:
    class Branching(Reading):
        def forward(self, q: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
            sides = self.cache.kv_0, self.cache.host_kv_0
            self.cache.host_kv_0.add_(1)

            def attend(x: Tensor, near: Tensor, far: Tensor) -> Tensor:
                return ops.ATTEND(x, near, far, starts, counts, 0.5, 2)

            return torch.cond(q.sum() > 0, attend, lambda x, near, far: x.clone(), (q * self.weight, *sides))

    with pytest.raises(UnsupportedProgramError, match="penstock::kv_attend at .* stands inside control flow"):
        for_cuda(offloaded(Branching(), Q))


@pytest.mark.parametrize(("most", "bounded"), [(40, True), (None, False)])
def test_what_attention_allocates_is_bounded(most: int | None, bounded: bool) -> None:
    """By the highest number of tokens, for a GPU; the compiler knows of its result alone."""
    tokens = torch.export.Dim("tokens", min=2, max=most)
    with torch.no_grad():
        dynamic = ({2: tokens}, {2: tokens}, None, None)
        ep = torch.export.export(Cached(), (Q, K, STARTS, COUNTS), dynamic_shapes=dynamic)
    ep = penstock.apply_weight_offload(ep)
    cache = Cached().cache
    wanted = workspace_bound_bytes(
        batch=1,
        heads=4,
        kv_heads=2,
        tokens=most or 0,
        head_dim=8,
        element_bytes=4,
        capacity=cache.split.capacity,
    )
    assert kv_workspace_bound_bytes(ep, CUDA) == (wanted if bounded else None)
    assert kv_workspace_bound_bytes(ep, torch.device("cpu")) == 0


def test_programs_without_a_cache_need_none() -> None:
    with torch.no_grad():
        ep = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    assert kv_workspace_bound_bytes(ep, CUDA) == 0
