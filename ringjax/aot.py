"""Ahead-of-time compilation for TPU and GPU topologies, without access to the devices.

Install the compiler of the target first: ``pip install '.[aot-tpu]'`` or ``pip install '.[aot-cuda]'`` in a clone.
"""

from ringjax._src.aot.compile import ENVIRONMENT, neighbor_cycle, ring_mesh
from ringjax._src.aot.targets import Target, target_named

__all__ = ["ENVIRONMENT", "Target", "neighbor_cycle", "ring_mesh", "target_named"]
