"""The methods of a language model's program, and which of them takes which tokens.

decode   a few tokens: always the same number of rows, the rest of them padding, and the logits of every row. So what is
         computed for a token does not depend on how many come with it: speculation changes no bit.
prefill  a prompt, or a piece of one, of any length up to a limit; the logits of the last token.
chunk    instead of prefill, if torch.export cannot leave the length open: pieces of one fixed length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Methods:
    """The sizes that a program was compiled for."""

    batch: int
    cache_length: int
    decode_tokens: int
    # The longest piece, or with is_fixed the only length. 0: prompts go through decode.
    prefill_tokens: int
    is_fixed: bool = False
    takes_padding: bool = True
    # Whether the KV cache lies on both sides of the link.
    host_cache: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        if not self.prefill_tokens:
            return ("decode",)
        return ("chunk" if self.is_fixed else "prefill", "decode")

    @property
    def slots(self) -> int:
        """Slots of the cache: the padding of a last decode run goes after the last position."""
        return self.cache_length + self.decode_tokens - 1


@dataclass(frozen=True)
class Piece:
    method: str
    begin: int
    end: int


def pieces(methods: Methods, count: int, all_logits_of: int) -> Iterator[Piece]:
    """Splits `count` tokens into runs; the last `all_logits_of` of them must give their logits.

    A prompt goes through prefill, which gives the logits of its last token. The tokens after it, whose logits are all
    wanted, go through decode, as they would one by one. So candidates of a speculation do not change a prompt's pieces.
    """
    at = 0
    prompt_end = 0 if all_logits_of == count else count - (all_logits_of - 1)
    while at < prompt_end:
        left = prompt_end - at
        if methods.is_fixed and left >= methods.prefill_tokens > 0:
            taken, method = methods.prefill_tokens, "chunk"
        elif not methods.is_fixed and left > max(1, methods.decode_tokens) and methods.prefill_tokens:
            taken, method = min(left, methods.prefill_tokens), "prefill"
        else:
            taken, method = min(left, methods.decode_tokens), "decode"
        yield Piece(method, at, at + taken)
        at += taken
    while at < count:
        taken = min(count - at, methods.decode_tokens)
        yield Piece("decode", at, at + taken)
        at += taken
