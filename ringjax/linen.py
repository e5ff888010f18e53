"""Flax Linen layers."""

from ringjax._src.flax.linen import DilatedSelfAttention

__all__ = ["DilatedSelfAttention"]
