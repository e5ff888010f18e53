"""Decoding with a fixed-size KV cache that holds only the selected rows of the current segments."""

from ringjax._src.decode.cache import DecodeCache, init_cache, prefill
from ringjax._src.decode.sampling import generate
from ringjax._src.decode.step import decode_step

__all__ = ["DecodeCache", "decode_step", "generate", "init_cache", "prefill"]
