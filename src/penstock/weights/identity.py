"""What makes a weights file fit a program: the layout of its weights and states, never their values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from penstock.weight import State, Weight


def layout_identity(weights: Iterable[Weight], states: Iterable[State]) -> str:
    """The same for a fine-tuned model; another one as soon as a name, a tie, a dtype, a shape or a layout differs."""
    document = {
        "weights": sorted((w.name, sorted(w.aliases), w.dtype, w.shape, w.dim_order) for w in weights),
        "states": sorted((s.name, s.dtype, s.shape, s.dim_order) for s in states),
    }
    canonical = json.dumps(document, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
