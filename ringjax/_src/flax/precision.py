"""Which dtype a device computes fastest in without losing range."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ringjax._src.validation import shown

_AMPERE = 8.0  # the first compute capability with bfloat16


def compute_dtype(device: jax.Device | None = None) -> np.dtype:
    """The dtype for the `dtype` of a layer: bfloat16 where the device computes it natively, float32 elsewhere.

    The models of `ringjax.models` take it where their `dtype` is None; layers and functions never do by themselves.

    Args:
        device: The device, or None for the default one.

    Returns:
        bfloat16 on TPUs and on GPUs of compute capability 8.0 and later, float32 elsewhere.

    Raises:
        ValueError: If `device` is not a device.

    Example:
        >>> import jax, ringjax as rj
        >>> rj.compute_dtype(jax.devices("cpu")[0])
        dtype('float32')
    """
    device = jax.devices()[0] if device is None else device
    if not hasattr(device, "platform"):
        raise ValueError(f"`device` must be a device of JAX, got {shown(device)}.")
    is_native = device.platform == "tpu" or _capability(device) >= _AMPERE
    return jnp.dtype(jnp.bfloat16 if is_native else jnp.float32)


def _capability(device: jax.Device) -> float:
    """CUDA's compute capability, or 0."""
    if device.platform not in ("gpu", "cuda"):
        return 0.0
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # other makers' GPUs name theirs otherwise
        return 0.0
