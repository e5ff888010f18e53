"""Decoding with a small cache: the rows of the current segments instead of the whole sequence."""

from ringjax.decode.cache import DecodeCache, init_cache
from ringjax.decode.prompt import prefill
from ringjax.decode.sampling import generate
from ringjax.decode.step import decode_step

__all__ = ["DecodeCache", "decode_step", "generate", "init_cache", "prefill"]
