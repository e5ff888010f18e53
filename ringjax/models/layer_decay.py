"""Layer-wise decay of the learning rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from ringjax._src.validation import check_float, check_instance
from ringjax.models.block import BlockStack
from ringjax.models.slide import SlideEncoder

Path = tuple[Any, ...]


def layer_decay(model: nnx.Module, decay: float) -> Any:  # noqa: ANN401
    """Creates an optax transformation that scales the updates of early layers down, for fine-tuning.

    With L blocks, the updates of block ``i`` are multiplied by ``decay ** (L - i)`` and those of the embedding of an
    encoder or decoder (of `SlideEncoder`: also of the CLS token) by ``decay ** (L + 1)``. All others, such as those of
    norms after the blocks and of a head, are unchanged. Prov-GigaPath is fine-tuned with a decay of 0.95. Put the
    transformation last in `optax.chain`. Requires optax.

    Args:
        model: A `SlideEncoder`, `LongNetEncoder` or `LongNetDecoder`, or a module that contains some.
        decay: Factor per layer, above 0 and at most 1.

    Returns:
        An `optax.GradientTransformation`, for updates with the paths of ``nnx.state(model, nnx.Param)`` or some.

    Raises:
        ValueError: If `model` is not a module or contains no such model, or `decay` is out of range. The update raises
            if a path is not one of the model.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> from ringjax.models import LongNetConfig, LongNetDecoder, layer_decay
        >>> model = LongNetDecoder(LongNetConfig.tiny(vocab_size=8), rngs=nnx.Rngs(0))
        >>> transformation = optax.chain(optax.adamw(1e-4), layer_decay(model, 0.95))
        >>> optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    """
    import optax  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional dependency

    check_instance("model", model, nnx.Module)
    decay = check_float("decay", decay, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
    scales = _scales(model, decay)

    def update(updates: Any, _: Any) -> Any:  # noqa: ANN401
        return jax.tree_util.tree_map_with_path(lambda path, x: _scaled(scales, _names(path), x), updates)

    return optax.stateless(update)


def _scales(model: nnx.Module, decay: float) -> dict[Path, np.ndarray]:
    """Returns the factor of each parameter by its path; those of blocks have one entry per block."""
    found = {path: module for path, module in nnx.iter_modules(model) if isinstance(module, BlockStack | SlideEncoder)}
    if not found:
        raise ValueError(f"`model` must contain an encoder or decoder of ringjax, got {type(model).__name__}.")
    scales: dict[Path, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        scale: np.ndarray = np.ones(())
        for start, module in found.items():
            inner = path[len(start) :] if path[: len(start)] == start else ("",)
            depth = module.config.num_layers
            if inner[0] == "blocks":
                exponents = np.arange(depth, 0, -1).reshape(-1, *(1,) * (variable[...].ndim - 1))
                scale = decay**exponents
            elif inner[0] in ("embed", "cls_token"):
                scale = np.asarray(decay ** (depth + 1))
        scales[path] = scale
    return scales


def _names(path: Path) -> Path:
    """Returns a path of `jax.tree_util` as names, without the last key of a variable."""
    names = tuple(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
    return names[:-1] if names and names[-1] in ("value", "raw_value") else names


def _scaled(scales: dict[Path, np.ndarray], path: Path, x: Array) -> Array:
    if path not in scales:
        raise ValueError(f"`updates` must have the paths of the parameters of `model`, got {path}.")
    return x * jnp.asarray(scales[path], x.dtype)
