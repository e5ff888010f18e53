"""ringjax: dilated (LongNet) attention for JAX."""

from ringjax.attention import dilated_attention
from ringjax.indices import CacheInfo, pattern_cache_clear, pattern_cache_info
from ringjax.pattern import Coverage, DilationPattern
from ringjax.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "CacheInfo",
    "Coverage",
    "DilationPattern",
    "dilated_attention",
    "pattern_cache_clear",
    "pattern_cache_info",
    "reference_attention",
]
