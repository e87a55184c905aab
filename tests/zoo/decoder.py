"""The decoder of the examples, under the name by which the tests know their models."""

from __future__ import annotations

from examples.decoder import LLAMA3_8B, TINY, CachedDecoder, Decoder, DecoderConfig, build, cache_free, methods

__all__ = ["LLAMA3_8B", "TINY", "CachedDecoder", "Decoder", "DecoderConfig", "build", "cache_free", "methods"]
