"""Makes text that came out of a file safe to show: in an error message, in a table, on a terminal.

A name in a damaged or hostile file may hold an escape sequence that moves the cursor, changes the title or hides what
follows, an override that turns the reading order around, or half a surrogate pair, which no encoder takes. Whoever
shows such text passes it through here first.
"""

import re

# C0 controls (newline, tab and escape among them), DEL and C1 controls, line and paragraph separators, the marks and
# overrides of bidirectional text, the byte order mark, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with every character that a terminal would act upon replaced by its escape; other text as it is."""
    return _UNSAFE.sub(lambda match: _escaped(ord(match.group())), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
