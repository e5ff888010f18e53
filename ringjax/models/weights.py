"""Conversion of the arrays of torchscale modules to parameters of ringjax models."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ringjax._src.validation import check_instance
from ringjax.models.config import LongNetConfig

Weights = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Module = TypeVar("Module", bound=nnx.Module)

# our names and torchscale's names within a block
LINEARS = {"expand": "ffn.fc1", "contract": "ffn.fc2"}
HEADS = {name: f"self_attn.{short}_proj" for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
NORMS = {"attention_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"}
SUB_NORM, HIDDEN_NORM, OUT = "self_attn.inner_attn_ln", "ffn.ffn_layernorm", "self_attn.out_proj"
XPOS = "self_attn.xpos.scale"
FINAL_NORM = "layer_norm"


def check_names(state_dict: object) -> Mapping[str, Any]:
    """Checks that `state_dict` is a mapping with strings as keys."""
    found: Mapping[str, Any] = check_instance("state_dict", state_dict, Mapping)
    for name in found:
        check_instance("state_dict", name, str)
    return found


def count_layers(names: Iterable[str]) -> int:
    """Returns the number of layers of an encoder or decoder with these names."""
    return len({found[1] for name in names if (found := re.match(r"layers\.(\d+)\.", name))})


def stack_shapes(
    num_layers: int, features: int, hidden: int, *, has_sub_norm: bool, has_final_norm: bool, xpos_pairs: int = 0
) -> Shapes:
    """Returns the shapes of the arrays of a torchscale encoder or decoder, by name, without its embeddings."""
    linears = {name: (features, features) for name in (*HEADS.values(), OUT)}
    linears |= {LINEARS["expand"]: (hidden, features), LINEARS["contract"]: (features, hidden)}
    norms = dict.fromkeys(NORMS.values(), (features,))
    norms |= {SUB_NORM: (features,), HIDDEN_NORM: (hidden,)} if has_sub_norm else {}
    inner: Shapes = {f"{name}.weight": shape for name, shape in (linears | norms).items()}
    inner |= {f"{name}.bias": shape[:1] for name, shape in (linears | norms).items()}
    inner |= {XPOS: (xpos_pairs,)} if xpos_pairs else {}
    shapes = {f"layers.{i}.{name}": shape for i in range(num_layers) for name, shape in inner.items()}
    return shapes | (norm_shapes(FINAL_NORM, features) if has_final_norm else {})


def norm_shapes(name: str, features: int) -> Shapes:
    """Returns the shapes of the arrays of a layer norm."""
    return {f"{name}.weight": (features,), f"{name}.bias": (features,)}


def read_arrays(state_dict: Mapping[str, Any], names: Collection[str], prefix: str) -> Weights:
    """Returns these arrays, whose names in the state dict have the prefix; checks that they are finite numbers."""
    arrays = {name: to_numpy(prefix + name, state_dict[prefix + name]) for name in names}
    # a sum needs no temporary array, and is finite only if all elements are
    bad = sorted(prefix + name for name, x in arrays.items() if not np.isfinite(np.sum(x, dtype=np.float64)))
    if bad:
        raise ValueError(f"`state_dict` must have finite arrays, got NaN or infinity in {shown_names(bad)}.")
    return arrays


def to_numpy(name: str, x: Any) -> np.ndarray:  # noqa: ANN401
    """Returns an array or a tensor of PyTorch, on any device, as a numpy array of real numbers."""
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # unknown to numpy
            x = x.float()
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"`state_dict` must have arrays of real numbers, got {type(x).__name__} for {name!r}.")
    return array


def check_shapes(weights: Weights, shapes: Shapes, prefix: str) -> None:
    """Checks the shapes of arrays; the error lists those that differ."""
    wrong = [name for name in shapes if weights[name].shape != shapes[name]]
    if wrong:
        expected, given = ({prefix + name: x for name, x in each} for each in _pairs(weights, shapes, wrong[:3]))
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"`state_dict` must have arrays of consistent shapes: the model expects {expected}, got {given}{more}."
        )


def _pairs(weights: Weights, shapes: Shapes, names: list[str]) -> tuple[list[tuple[str, tuple[int, ...]]], ...]:
    return [(name, shapes[name]) for name in names], [(name, weights[name].shape) for name in names]


def shown_names(names: list[str]) -> str:
    """Formats names for a message, at most five of them."""
    return str(names) if len(names) <= 5 else f"{names[:5]} and {len(names) - 5} more"


def stack_parameters(weights: Weights, config: LongNetConfig) -> dict[str, Any]:
    """Returns the parameters of the blocks and of the final norm of a ringjax model, nested by name."""
    blocks = [_block(weights, f"layers.{i}.", config) for i in range(config.num_layers)]
    parameters: dict[str, Any] = {"blocks": jax.tree.map(lambda *each: np.stack(each), *blocks)}
    if config.final_norm:
        parameters["norm"] = norm_parameters(weights, FINAL_NORM)
    return parameters


def norm_parameters(weights: Weights, name: str) -> dict[str, np.ndarray]:
    """Returns the parameters of a layer norm."""
    return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}


def linear_parameters(weights: Weights, name: str) -> dict[str, np.ndarray]:
    """Returns the parameters of a linear layer."""
    return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}


def _block(weights: Weights, prefix: str, config: LongNetConfig) -> dict[str, Any]:
    dim = config.features // config.num_heads
    halves = np.arange(dim).reshape(-1, 2).T.ravel() if config.positions else np.arange(dim)  # 0 2 4 … 1 3 5 …
    attention: dict[str, Any] = {}
    for ours, theirs in HEADS.items():
        kernel, bias = weights[f"{prefix}{theirs}.weight"].T, weights[f"{prefix}{theirs}.bias"]
        order = np.arange(dim) if ours == "value" else halves
        attention[ours] = {
            "kernel": kernel.reshape(config.features, config.num_heads, dim)[..., order],
            "bias": bias.reshape(config.num_heads, dim)[:, order],
        }
    out = weights[f"{prefix}{OUT}.weight"].T.reshape(config.num_heads, dim, config.features)
    attention["out"] = {"kernel": out, "bias": weights[f"{prefix}{OUT}.bias"]}
    block: dict[str, Any] = {"attention": attention}
    for ours, theirs in LINEARS.items():
        block[ours] = linear_parameters(weights, prefix + theirs)
    for ours, theirs in NORMS.items():
        block[ours] = norm_parameters(weights, prefix + theirs)
    if config.sub_norm:
        attention["sub_norm"] = norm_parameters(weights, prefix + SUB_NORM)
        block["hidden_norm"] = norm_parameters(weights, prefix + HIDDEN_NORM)
    return block


def load_params(empty: Module, parameters: dict[str, Any], mesh: Mesh | None) -> Module:
    """Returns an abstract model with these parameters, nested by name, in the sharding of the model."""
    graph, state = nnx.split(empty)
    shapes, specs = nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))
    sharding = jax.tree.map(lambda _, spec: None if mesh is None else NamedSharding(mesh, spec), parameters, specs)
    typed = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), parameters, shapes)
    nnx.replace_by_pure_dict(state, jax.tree.map(jax.device_put, typed, sharding))
    return nnx.merge(graph, state)
