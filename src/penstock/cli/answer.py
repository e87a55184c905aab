"""One answer: writes tokens to stdout as they come, ends early on Ctrl-C, and measures its own speed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from penstock.cli.output import write_stdout
from penstock.cli.pretrained import one_line
from penstock.cli.units import short_bytes, short_rate, short_time
from penstock.errors import PenstockError, RuntimeFailure
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock.runtime.session import Stats

# Until its last token is there, a character of several tokens decodes to "\ufffd". A "\r" may begin a "\r\n".
_INCOMPLETE = ("\ufffd", "\r")
# No character has more bytes than this, so what is still incomplete after this many tokens stays incomplete.
_LONGEST_CHARACTER = 4
# printable() would escape these, but text needs them: newlines, tabs, and the joiners inside words and emoji.
_KEPT = re.compile("([\n\t\u200c\u200d])")


@dataclass(frozen=True)
class Speed:
    tokens: int
    # Runs of the program, including the prompt's. With prompt lookup there are fewer runs than tokens.
    passes: int
    # From the call to the last token; the first one waits for the whole prompt.
    seconds: float
    first_token_s: float | None
    # Of the tokens after the first; None if there was at most one.
    tokens_per_s: float | None
    bytes_streamed: int
    streamed_bytes_per_s: float
    # Measured when the model was loaded; None if nothing is ever copied.
    link_bytes_per_s: float | None
    link_part: float | None
    budget_bytes: int
    floor_bytes: int

    def __str__(self) -> str:
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.2f} tokens/s"
        first = "" if self.first_token_s is None else f" (the first after {short_time(self.first_token_s)})"
        part = ""
        if self.link_bytes_per_s and self.link_part is not None:
            part = f", {self.link_part:.0%} of the measured {short_rate(self.link_bytes_per_s)}"
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        passes = f", {self.tokens / max(self.passes, 1):.2f} tokens a pass"
        return (
            f"{tokens}{rate}{first}{passes}; {short_rate(self.streamed_bytes_per_s)} over the link{part}; "
            f"budget {short_bytes(self.budget_bytes)}, floor {short_bytes(self.floor_bytes)}"
        )


@dataclass(frozen=True)
class Answer:
    # Tokens of the prompt, then of the answer.
    ids: list[int]
    text: str
    speed: Speed
    stopped: bool


class StopAsked:
    """Ctrl-C ends the answer after the token that is under way. A second Ctrl-C does not wait for that token."""

    def __init__(self) -> None:
        self.asked = False
        self._earlier: Callable[[int, FrameType | None], Any] | int | None = None

    def __enter__(self) -> StopAsked:
        self._earlier = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._earlier)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and callable(self._earlier):
            self._earlier(number, frame)
        self.asked = True


class TokenStream:
    """Receives the tokens of generate(). The first call brings the prompt's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt_seen = False
        # The line that is being written: its tokens, and the part of it that is on stdout.
        self._line: list[int] = []
        self._written = ""
        self._withheld = 0
        self.tokens = 0
        self.first_tokens = 0
        self.first_s = self.last_s = 0.0

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = value.flatten().tolist()
        self.last_s = time.perf_counter()
        if not self.tokens:
            self.first_tokens, self.first_s = len(new), self.last_s
        self.tokens += len(new)
        self._line += new
        self._withheld += len(new)
        text = self._decoded()
        if text.endswith(_INCOMPLETE) and self._withheld < _LONGEST_CHARACTER:
            return
        self._write(text)
        if text.endswith("\n"):
            # Decoding the whole answer again for every token would take time quadratic in its length.
            self._line, self._written = [], ""

    def end(self) -> None:
        if self._withheld:
            self._write(self._decoded())

    def _decoded(self) -> str:
        return decoded(self._tokenizer, self._line)

    def _write(self, text: str) -> None:
        # A character given up as incomplete may be complete by now. What was written of it is not taken back.
        new, self._written, self._withheld = text[len(self._written) :], text, 0
        write_stdout(safe_text(new))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes without cleaning up spaces: text that was written must not change when more follows."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def safe_text(text: str) -> str:
    """A model's text, safe to show: a model could write escape sequences, too."""
    parts = _KEPT.split(text.replace("\r\n", "\n"))
    return "".join(part if _KEPT.fullmatch(part) else printable(part) for part in parts)


def answer(
    transformers: ModuleType, model: Any, tokenizer: Any, ids: list[int], stop: StopAsked, **options: Any
) -> Answer:
    """generate(), with the tokens on stdout. Raises Penstock's errors, and OSError as it is."""
    import torch

    class Stop(transformers.StoppingCriteria):  # type: ignore[name-defined, misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), stop.asked, device=input_ids.device, dtype=torch.bool)

    stream = TokenStream(tokenizer)
    given = torch.tensor([ids], device=model.device)
    before = model.stats()
    began_s = time.perf_counter()
    try:
        with torch.no_grad():
            found = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                streamer=stream,
                stopping_criteria=transformers.StoppingCriteriaList([Stop()]),
                **options,
            )
    except (PenstockError, OSError):  # OSError: nobody reads stdout
        raise
    except Exception as error:
        raise RuntimeFailure(f"generating failed: {one_line(error)}") from error
    after = model.stats()
    all_ids = found[0].tolist()
    return Answer(
        ids=all_ids,
        text=decoded(tokenizer, all_ids[len(ids) :]),
        speed=_speed(model, stream, began_s, before, after),
        stopped=stop.asked,
    )


def _speed(model: Any, stream: TokenStream, began_s: float, before: Stats, after: Stats) -> Speed:
    bytes_streamed = after.bytes_streamed - before.bytes_streamed
    seconds = max(stream.last_s - began_s, 1e-9)
    later, later_s = stream.tokens - stream.first_tokens, stream.last_s - stream.first_s
    link = model.link_bytes_per_s
    rate = bytes_streamed / seconds
    return Speed(
        tokens=stream.tokens,
        passes=after.runs - before.runs,
        seconds=seconds,
        first_token_s=stream.first_s - began_s if stream.tokens else None,
        tokens_per_s=later / later_s if later and later_s > 0 else None,
        bytes_streamed=bytes_streamed,
        streamed_bytes_per_s=rate,
        link_bytes_per_s=link,
        link_part=rate / link if link else None,
        budget_bytes=model.budget_bytes,
        floor_bytes=model.floor_bytes,
    )
