"""Flax NNX layers."""

from ringjax._src.flax.nnx import DilatedSelfAttention

__all__ = ["DilatedSelfAttention"]
