"""Small models that the tests export: every builder returns one or more `Case`s, seeded, in eval mode, without grad."""

from __future__ import annotations

from examples.decoder import Case, export, freeze

__all__ = ["Case", "export", "freeze"]
