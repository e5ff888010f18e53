"""Ahead-of-time compilation for TPU and GPU topologies that are not attached."""

from ringjax._src.aot.compile import ENVIRONMENT, neighbor_cycle, ring_mesh
from ringjax._src.aot.targets import Target, target_named

__all__ = ["ENVIRONMENT", "Target", "neighbor_cycle", "ring_mesh", "target_named"]
