"""Every family that is said to work: the model that owns its cache, exported, against transformers' own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.export import export_methods
from penstock.models.families import REFUSED, TESTED, TOKEN_BY_TOKEN, UNTESTED_VARIABLE, check_family
from penstock.models.methods import Methods
from penstock.models.state_cache import layer_kinds
from penstock.models.stateful import make_stateful, traceable
from tests.docs.pages import read_page
from tests.models.families import FAMILIES, build
from tests.models.test_generation import COMPILED

BATCH, LENGTH, TOKENS = 2, 40, 14
# Of the deviation of the logits, in float32: order of sums, and nothing else.
CLOSE = 2e-5


def test_families_and_refusals_are_all_tried() -> None:
    assert TESTED | set(REFUSED) == set(FAMILIES)
    assert not TESTED & set(REFUSED)
    assert len(TESTED) >= 40
    assert TOKEN_BY_TOKEN <= TESTED


def test_the_page_lists_what_was_tried() -> None:
    """docs/models.md: compiled ones, exported ones, and every refusal with its reason."""
    text = read_page("docs/models.md")
    rows = {
        cells[0]: cells[1]
        for line in text.splitlines()
        if len(cells := [c.strip() for c in line.split("|")[1:-1]]) == 2
    }
    compiled = set(rows["compiled, and generated with at the floor and above"].split(", "))
    assert compiled == {"llama", *COMPILED}
    assert compiled | set(rows["exported"].split(", ")) == TESTED
    for family, reason in REFUSED.items():
        said = next(value for key, value in rows.items() if family in key.split(", "))
        assert said.startswith("refused: "), family
        assert reason in said or "," in next(key for key in rows if family in key.split(", "))


def test_what_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=f"'reformer' were not tested with Penstock. To try one, set {UNTESTED_VARIABLE}=1"
    ):
        check_family("reformer", "5.22.2")
    with pytest.raises(ModelError, match="transformers 5.23.0 was not tested with Penstock; 5.17 to 5.22 were"):
        check_family("llama", "5.23.0")
    monkeypatch.setenv(UNTESTED_VARIABLE, "1")
    check_family("reformer", "5.22.2")
    check_family("llama", "6.0.0.dev0")
    with pytest.raises(ModelError, match="'rwkv' are not supported: it keeps its state in a form of its own"):
        check_family("rwkv", "5.22.2")
    for family, version in (("doge", "5.21.0"), ("llama", "5.16.3")):
        with pytest.raises(ModelError, match="need transformers 5.* or newer"):
            check_family(family, version)


def _tokens() -> Tensor:
    return torch.randint(3, 500, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))


def _stateful(family: str) -> tuple[Any, Any, Methods]:
    """Twice the same weights: transformers' model, and one that owns its cache."""
    reference, model = build(family), build(family)
    model.load_state_dict(reference.state_dict())
    state = make_stateful(model, slots=LENGTH, batch=BATCH)
    kinds = layer_kinds(model.config)
    assert kinds.scans == any(part.field == "recurrent_states" for part in state.parts)
    longest = (0 if family in TOKEN_BY_TOKEN else 4) if kinds.scans else 16
    # No padding behind decoded tokens here, so that the cache has the slots that it was made with.
    methods = Methods(BATCH, LENGTH, 1, longest, is_fixed=kinds.scans, takes_padding=not kinds.is_recurrent)
    return reference, model, methods


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


@pytest.mark.parametrize("family", sorted(TESTED))
def test_exported_programs_give_its_logits(family: str) -> None:
    """In pieces: a prompt, a second piece of it, single tokens. In runs of the exported graph, which no Python of the
    model's is part of."""
    reference, model, methods = _stateful(family)
    ids = _tokens()
    with torch.no_grad():
        want = reference(ids).logits
    assert len(set(want.argmax(-1).flatten().tolist())) > 10
    programs = {name: program.module() for name, program in export_methods(model, methods).items()}
    more = [torch.ones(BATCH, methods.slots, dtype=torch.int64)] if methods.takes_padding else []

    def run(name: str, begin: int, end: int) -> Tensor:
        start = torch.full((BATCH,), begin)
        made: Tensor = programs[name](ids[:, begin:end], start, *more)
        # Each program has its own copy of the cache; one at a time holds it.
        return made

    cuts = [(0, 4), (4, 8)] if methods.is_fixed else [(0, 7), (7, 10)]
    prompt = "chunk" if methods.is_fixed else "prefill"
    with torch.no_grad():
        if prompt in programs:
            for begin, end in cuts:
                assert _error(run(prompt, begin, end)[:, -1], want[:, end - 1]) < CLOSE, (begin, end)
            _share_state(programs[prompt], programs["decode"])
        for at in range(cuts[-1][1] if prompt in programs else 0, TOKENS):
            assert _error(run("decode", at, at + 1)[:, 0], want[:, at]) < CLOSE, at


def _share_state(source: Any, target: Any) -> None:
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if "cache_" in name:
            buffer.copy_(buffers[name])


@pytest.mark.parametrize("family", sorted(TESTED))
def test_rows_stand_at_different_places(family: str) -> None:
    """One row goes on, the other goes back and on from there; each gives what it would alone."""
    reference, model, methods = _stateful(family)
    if not methods.takes_padding:
        pytest.skip("recurrent: its rows cannot go back")
    ids = _tokens()
    with torch.no_grad():
        want = reference(ids).logits
    mask = torch.ones(BATCH, methods.slots, dtype=torch.int64)
    with traceable():
        model.kept_logits = 0
        model(ids[:, :9], torch.zeros(BATCH, dtype=torch.int64), mask)
        got = model(torch.stack([ids[0, 9:12], ids[1, 5:8]]), torch.tensor([9, 5]), mask)
    assert _error(got[0], want[0, 9:12]) < CLOSE
    assert _error(got[1], want[1, 5:8]) < CLOSE


@pytest.mark.parametrize("family", sorted(TESTED))
def test_padding_on_the_left_is_not_seen(family: str) -> None:
    reference, model, methods = _stateful(family)
    if not methods.takes_padding:
        pytest.skip("recurrent: padding is refused")
    ids = _tokens()
    ids[1, :5] = 0
    mask = torch.ones(BATCH, methods.slots, dtype=torch.int64)
    mask[1, :5] = 0
    with torch.no_grad():
        alone = reference(ids[1:, 5:]).logits
    with traceable():
        model.kept_logits = 0
        got = model(ids, torch.zeros(BATCH, dtype=torch.int64), mask)
    assert _error(got[1, 5:], alone[0]) < CLOSE


@pytest.mark.parametrize("family", ["gpt_neo", "recurrent_gemma"])
def test_what_is_refused_would_be_wrong(family: str) -> None:
    """And nobody would be told: should one of these come out right, it can be supported."""
    reference, model, methods = _stateful(family)
    ids = _tokens()
    more = [torch.ones(BATCH, methods.slots, dtype=torch.int64)] if methods.takes_padding else []
    with torch.no_grad():
        want = reference(ids).logits
    with traceable():
        model.kept_logits = 0
        parts = [model(ids[:, a:b], torch.full((BATCH,), a), *more) for a, b in ((0, 8), (8, 11), (11, 14))]
    assert _error(torch.cat(parts, 1), want) > 100 * CLOSE


@pytest.mark.parametrize("family", ["jetmoe", "mpt", "rwkv", "xglm"])
def test_what_is_refused_cannot_be_traced(family: str) -> None:
    with pytest.raises((ModelError, RuntimeError, NotImplementedError)):
        model = build(family, meta=True)
        make_stateful(model, slots=LENGTH, batch=BATCH)
        export_methods(model, Methods(BATCH, LENGTH, 1, 16))
