"""Where torch puts the compiled code in a .pt2 archive. Needs no torch."""

from __future__ import annotations

CODE_FOLDER = "data/aotinductor/"
