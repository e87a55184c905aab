"""A conversation on one KV cache: each turn runs only the tokens that the cache does not hold yet."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from penstock.cli.answer import Answer, StopAsked, answer
from penstock.cli.pretrained import one_line
from penstock.errors import CheckpointError, InputError


class Conversation:
    """`messages` are in the form that the chat template takes. They change only when a turn has succeeded."""

    def __init__(self, transformers: ModuleType, model: Any, tokenizer: Any, max_new_tokens: int | None) -> None:
        self._transformers = transformers
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._cache: Any = None
        # The tokens that the cache holds.
        self._held: list[int] = []
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = []
        self._drop_cache()

    @property
    def held_tokens(self) -> int:
        return len(self._held)

    def turn(self, text: str, stop: StopAsked, **options: Any) -> Answer:
        """Raises InputError if there is no room for it; then nothing has changed."""
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.token_ids(asked)
        length = self._model.cache_length
        if len(ids) >= length:
            raise InputError(
                f"with this message the conversation has {len(ids)} tokens, and the KV cache has room for {length}. "
                "Nothing was lost: send a shorter message, /reset to begin anew, or start again with a larger "
                "--cache-length"
            )
        self._keep_common(ids)
        room = length - len(ids)
        options["max_new_tokens"] = room if self._max_new_tokens is None else min(room, self._max_new_tokens)
        try:
            found = answer(
                self._transformers, self._model, self._tokenizer, ids, stop, past_key_values=self._cache, **options
            )
        except BaseException:
            # How far it got is unknown.
            self._drop_cache()
            raise
        # The last token was drawn but not run, so the cache does not hold it.
        self._held = found.ids[: int(self._cache.get_seq_length())]
        self.messages = [*asked, {"role": "assistant", "content": found.text}]
        return found

    def is_full(self, found: Answer) -> bool:
        """Whether the answer ended because there was no more room."""
        return len(found.ids) >= int(self._model.cache_length)

    def token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            # The template has written the special tokens already.
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        except Exception as error:  # templates are programs, and raise what they like
            raise CheckpointError(f"the chat template refused the conversation: {one_line(error)}") from error

    def _keep_common(self, ids: list[int]) -> None:
        """Templates may rewrite earlier text (some drop what was thought aloud): what follows it is run again."""
        common = 0
        for ours, theirs in zip(self._held, ids, strict=False):
            if ours != theirs:
                break
            common += 1
        common = min(common, len(ids) - 1)  # something must be run, or nothing comes out
        if common == len(self._held):
            return
        if common and self._cache.is_croppable:
            self._cache.crop(common - len(self._held))
            self._held = ids[:common]
        else:
            self._drop_cache()

    def _drop_cache(self) -> None:
        # The device may not have room for two caches.
        self._cache = None
        self._held = []
        self._cache = self._model.new_cache()
