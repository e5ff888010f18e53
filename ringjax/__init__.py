"""ringjax: dilated (LongNet) attention for JAX."""

from ringjax.adapter import attention_fn
from ringjax.attention import count_tiles, dilated_attention, ring_dilated_attention
from ringjax.block.kernel import BlockSizes
from ringjax.decode import DecodeCache, decode_step, generate, init_cache, prefill
from ringjax.devices import Ring
from ringjax.indices import CacheInfo, pattern_cache_clear, pattern_cache_info
from ringjax.layout import from_layout, positions, to_layout
from ringjax.pattern import Coverage, DilationPattern
from ringjax.plan import BranchPlan, Plan, plan
from ringjax.precision import compute_dtype
from ringjax.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "BlockSizes",
    "BranchPlan",
    "CacheInfo",
    "Coverage",
    "DecodeCache",
    "DilationPattern",
    "Plan",
    "Ring",
    "attention_fn",
    "compute_dtype",
    "count_tiles",
    "decode_step",
    "dilated_attention",
    "from_layout",
    "generate",
    "init_cache",
    "pattern_cache_clear",
    "pattern_cache_info",
    "plan",
    "positions",
    "prefill",
    "reference_attention",
    "ring_dilated_attention",
    "to_layout",
]
