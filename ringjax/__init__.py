"""ringjax: dilated (LongNet) attention for JAX."""

from ringjax.attention import count_tiles, dilated_attention, ring_dilated_attention
from ringjax.block.kernel import BlockSizes
from ringjax.devices import Ring
from ringjax.indices import CacheInfo, pattern_cache_clear, pattern_cache_info
from ringjax.layout import from_layout, positions, to_layout
from ringjax.pattern import Coverage, DilationPattern
from ringjax.plan import BranchPlan, Plan, plan
from ringjax.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "BlockSizes",
    "BranchPlan",
    "CacheInfo",
    "Coverage",
    "DilationPattern",
    "Plan",
    "Ring",
    "count_tiles",
    "dilated_attention",
    "from_layout",
    "pattern_cache_clear",
    "pattern_cache_info",
    "plan",
    "positions",
    "reference_attention",
    "ring_dilated_attention",
    "to_layout",
]
