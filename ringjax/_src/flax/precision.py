"""The default compute dtype of a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ringjax._src.validation import shown

_AMPERE = 8.0  # the first compute capability with bfloat16


def compute_dtype(device: jax.Device | None = None) -> np.dtype:
    """Returns the recommended `dtype` of layers on a device: bfloat16 if it is native there, else float32.

    The models of `ringjax.models` use it if their `dtype` is None. Layers and functions do not use it by default.

    Args:
        device: The device, or None for the default device.

    Returns:
        bfloat16 on TPUs and on GPUs of compute capability 8.0 or later, float32 elsewhere.

    Raises:
        ValueError: If `device` is not a JAX device.

    Example:
        >>> import jax, ringjax as rj
        >>> rj.compute_dtype(jax.devices("cpu")[0])
        dtype('float32')
    """
    device = jax.devices()[0] if device is None else device
    if not hasattr(device, "platform"):
        raise ValueError(f"`device` must be a JAX device, got {shown(device)}.")
    is_native = device.platform == "tpu" or _capability(device) >= _AMPERE
    return jnp.dtype(jnp.bfloat16 if is_native else jnp.float32)


def _capability(device: jax.Device) -> float:
    """Returns the CUDA compute capability, or 0."""
    if device.platform not in ("gpu", "cuda"):
        return 0.0
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # other vendors use other names
        return 0.0
