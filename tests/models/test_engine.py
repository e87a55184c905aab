"""Tokens, rows, masks and caches, over a module that only notes what it was asked to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import InputError, ModelError, StateInvalidError
from penstock.models.engine import Engine
from penstock.models.methods import Methods
from penstock.models.token_cache import TokenCache

VOCABULARY = 7


@dataclass
class Noted:
    """Gives logits that say which token they follow."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    runs: list[tuple[str, list[list[int]], list[int]]] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    resets: int = 0
    selected: list[list[int]] = field(default_factory=list)
    failure: BaseException | None = None

    def run_method(self, method: str, ids: Tensor, start: Tensor, mask: Tensor | None = None) -> Tensor:
        self.runs.append((method, ids.tolist(), start.tolist()))
        if mask is not None:
            self.masks.append(mask)
        if self.failure is not None:
            raise self.failure
        logits = ids[..., None].expand(*ids.shape, VOCABULARY).float()
        return logits if method == "decode" else logits[:, -1:]

    def reset_state(self) -> None:
        self.resets += 1

    def select_state_rows(self, rows: Tensor) -> None:
        self.selected.append(rows.tolist())


DENSE = Methods(batch=2, cache_length=20, decode_tokens=3, prefill_tokens=6)
RECURRENT = Methods(batch=2, cache_length=20, decode_tokens=1, prefill_tokens=4, is_fixed=True, takes_padding=False)


def _engine(methods: Methods = DENSE) -> tuple[Engine, Noted]:
    module: Any = Noted()
    store: Any = None
    is_recurrent = not methods.takes_padding
    return Engine(module, methods, name="Model", is_recurrent=is_recurrent, has_experts=False, store=store), module


def _ids(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def _run(engine: Engine, cache: TokenCache, ids: Tensor, mask: Tensor | None = None, wanted: int = 1) -> Tensor:
    return engine.run(cache, ids, mask, None, wanted)


def test_rows_that_were_not_given_do_what_the_first_does() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    logits = _run(engine, cache, _ids(4, 5))
    assert logits[..., 0].tolist() == [[5.0]]
    assert module.runs == [("decode", [[4, 5, 5], [4, 5, 5]], [0, 0])], "and padding repeats the last token"
    assert cache.get_seq_length() == 2


def test_a_prompt_and_its_candidates() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    logits = _run(engine, cache, torch.arange(10)[None], wanted=3)
    assert logits[0, :, 0].tolist() == [7.0, 8.0, 9.0]
    assert [(method, len(ids[0]), start[0]) for method, ids, start in module.runs] == [
        ("prefill", 6, 0),
        ("decode", 3, 6),
        ("decode", 3, 8),
    ]
    cache.crop(-2)
    _run(engine, cache, _ids(3))
    assert module.runs[-1][2] == [8, 8]


def test_the_mask_is_made_once_for_as_long_as_padding_is_the_same() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    ids = torch.tensor([[1, 2, 3], [0, 0, 4]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    _run(engine, cache, ids, mask)
    _run(engine, cache, torch.tensor([[5], [6]]), torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1))
    _run(engine, cache, torch.tensor([[5], [6]]))
    assert module.masks[0].tolist() == [[1] * DENSE.slots, [0, 0, *[1] * (DENSE.slots - 2)]]
    assert module.masks[1] is module.masks[0] and module.masks[2] is module.masks[0]
    other = TokenCache(engine)
    _run(engine, other, _ids(1, 2))
    assert bool(module.masks[-1].all())


def test_a_mask_must_say_what_it_said() -> None:
    engine, _ = _engine()
    cache = TokenCache(engine)
    _run(engine, cache, _ids(1, 2), torch.tensor([[0, 1]]))
    with pytest.raises(InputError, match="masks other tokens than it did when they were run"):
        _run(engine, cache, _ids(3), torch.tensor([[1, 1, 1]]))
    with pytest.raises(InputError, match="attention_mask has 5 columns for 3 tokens"):
        _run(engine, cache, _ids(3), torch.ones(1, 5))
    with pytest.raises(InputError, match="2 rows of tokens for a cache of 1"):
        _run(engine, cache, torch.tensor([[1], [2]]))


def test_beams_are_reordered_with_their_mask() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    _run(engine, cache, torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]]))
    cache.reorder_cache(torch.tensor([1, 1]))
    assert module.selected == [[1, 1]] and cache.mask is not None and cache.mask.tolist() == [[0, 1], [0, 1]]
    cache.reorder_cache(torch.tensor([0, 1]))
    assert module.selected == [[1, 1]], "nothing moves"


def test_a_run_that_fails_leaves_attention_where_it_was() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    _run(engine, cache, _ids(1, 2))
    module.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run(engine, cache, _ids(3))
    module.failure = None
    assert cache.get_seq_length() == 2
    _run(engine, cache, _ids(3))
    assert module.runs[-1][2] == [2, 2]


def test_a_run_that_fails_ends_a_recurrent_cache() -> None:
    """The interrupt may have come when the run had ended: going on would run its token twice."""
    engine, module = _engine(RECURRENT)
    cache = TokenCache(engine)
    _run(engine, cache, _ids(1, 2))
    module.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run(engine, cache, _ids(3))
    module.failure = None
    with pytest.raises(InputError, match="a run over recurrent state was given up"):
        _run(engine, cache, _ids(3))
    assert module.resets == 1
    _run(engine, TokenCache(engine), _ids(3))
    assert module.resets == 2


def test_recurrent_caches_only_go_forward() -> None:
    engine, _ = _engine(RECURRENT)
    cache = TokenCache(engine)
    _run(engine, cache, torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]))
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ModelError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(ModelError, match="no prompt lookup, no assistant"):
        cache.activate_past_recording()
    with pytest.raises(ModelError, match="give rows of equal length"):
        _run(engine, TokenCache(engine), torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]]))


def test_half_written_state_says_what_to_do() -> None:
    engine, module = _engine()
    cache = TokenCache(engine)
    module.failure = StateInvalidError("call reset_state() first")
    with pytest.raises(StateInvalidError, match=r"begin a new one with model.new_cache\(\)"):
        _run(engine, cache, _ids(3))


def test_a_cache_cannot_be_in_two_places() -> None:
    import copy

    engine, _ = _engine()
    cache = TokenCache(engine)
    for way in (
        copy.deepcopy,
        lambda one: one.batch_repeat_interleave(2),
        lambda one: one.batch_select_indices(_ids(0)),
    ):
        with pytest.raises(ModelError):
            way(cache)
    assert repr(cache) == "TokenCache(0 of 20 tokens)"
