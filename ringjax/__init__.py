"""ringjax: dilated (LongNet) attention for JAX."""

from ringjax._src.api import count_tiles, dilated_attention, ring_dilated_attention
from ringjax._src.attention_rows import attention_rows
from ringjax._src.comm.layout import from_layout, positions, to_layout
from ringjax._src.comm.mesh import Ring
from ringjax._src.decode import DecodeCache, decode_step, generate, init_cache, prefill
from ringjax._src.flax.adapter import attention_fn
from ringjax._src.flax.precision import compute_dtype
from ringjax._src.flax.rotary import rotary, xpos
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.pattern import Coverage, DilationPattern
from ringjax._src.planning.branch_plan import BranchPlan
from ringjax._src.planning.plan import (
    CacheInfo,
    Plan,
    pattern_cache_clear,
    pattern_cache_info,
    plan,
)
from ringjax._src.reference import reference_attention

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
    "attention_rows",
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
    "rotary",
    "to_layout",
    "xpos",
]
