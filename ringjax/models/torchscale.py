"""Conversion of torchscale LongNet weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from ringjax._src.comm.mesh import Ring
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_instance, check_int, check_optional, shown
from ringjax.models.config import LongNetConfig
from ringjax.models.model import LongNetDecoder, LongNetEncoder

Kind = Literal["decoder", "encoder"]
Weights = dict[str, np.ndarray]
Model = LongNetDecoder | LongNetEncoder

# our names and torchscale's names within a block
LINEARS = {"expand": "ffn.fc1", "contract": "ffn.fc2"}
HEADS = {name: f"self_attn.{short}_proj" for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
NORMS = {"attention_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"}
SUB_NORM, HIDDEN_NORM, OUT = "self_attn.inner_attn_ln", "ffn.ffn_layernorm", "self_attn.out_proj"
XPOS = "self_attn.xpos.scale"


def from_torchscale(
    state_dict: Mapping[str, ArrayLike],
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    num_heads: int,
    *,
    kind: Kind | None = None,
    ring: Ring | None = None,
    **changes: Any,  # noqa: ANN401
) -> Model:
    """Creates a model with the weights of a torchscale `LongNetDecoder` or `LongNetEncoder`.

    The pattern uses torchscale's offsets (``"block"``) and mixing (``"detached"``). Sub-norms and xPos are used if the
    state dict contains them. Torchscale rotates pairs of adjacent dimensions, ringjax rotates halves, so the columns of
    the query and key projections are permuted. Settings that a state dict does not contain are assumed to have
    torchscale's defaults: gelu, pre-norm, unscaled embeddings, and a `scale_base` of 512 for xPos.

    The outputs match torchscale's if the length is a multiple of each segment length and the rates divide the segment
    lengths. Otherwise torchscale pads incomplete segments with zero keys, to which non-causal queries attend, and if a
    rate does not divide a segment length, it misplaces the rows of all segments but the first. An encoder without
    `embed_tokens` takes embeddings as inputs, like torchscale's `token_embeddings`.

    Args:
        state_dict: Arrays by name (anything that `numpy.asarray` accepts): ``layers.0.self_attn.q_proj.weight`` and so
            on, all with the same prefix, such as ``decoder.``.
        segment_lengths: Torchscale's `segment_length`.
        dilation_rates: Torchscale's `dilated_ratio`.
        num_heads: Number of heads.
        kind: ``"decoder"`` or ``"encoder"``; required if the prefix contains neither word.
        ring: The devices that share the sequence, or None.
        **changes: Further fields of `LongNetConfig`: `dtype`, `remat`, `scan_layers`, `norm_epsilon` (1e-5 by default).

    Returns:
        The model.

    Raises:
        ValueError: If `state_dict` has unknown, missing or inconsistent arrays (the error lists their names), `kind` is
            required or unknown, `num_heads` contradicts the state dict, or `changes` contain a field that the state
            dict determines.

    Example:
        >>> import numpy as np
        >>> from ringjax.models import from_torchscale
        >>> shapes = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8)}
        >>> shapes |= {"self_attn.out_proj": (8, 8), "ffn.fc1": (32, 8), "ffn.fc2": (8, 32)}
        >>> shapes |= {"self_attn_layer_norm": (8,), "final_layer_norm": (8,)}
        >>> weights = {f"encoder.layers.0.{name}.weight": np.ones(shape) for name, shape in shapes.items()}
        >>> weights |= {f"encoder.layers.0.{name}.bias": np.ones(shape[:1]) for name, shape in shapes.items()}
        >>> weights |= {f"encoder.layer_norm.{name}": np.ones(8) for name in ("weight", "bias")}
        >>> encoder = from_torchscale(weights, segment_lengths=(4, 16), dilation_rates=(1, 2), num_heads=2)
        >>> encoder(np.ones((1, 16, 8), np.float32)).shape, encoder.config.pattern.offsets
        ((1, 16, 8), 'block')
    """
    check_instance("state_dict", state_dict, Mapping)
    for name in state_dict:
        check_instance("state_dict", name, str)
    check_optional(check_instance, "ring", ring, Ring)
    num_heads = check_int("num_heads", num_heads)
    prefix, kind = _prefix_and_kind(state_dict, kind)
    weights = {name.removeprefix(prefix): np.asarray(x) for name, x in state_dict.items() if name.startswith(prefix)}
    num_layers = len({found[1] for name in weights if (found := re.match(r"layers\.(\d+)\.", name))})
    has_sub_norm, has_xpos = f"layers.0.{SUB_NORM}.weight" in weights, f"layers.0.{XPOS}" in weights
    has_tokens = kind == "decoder" or "embed_tokens.weight" in weights
    expected = _expected(num_layers, kind, has_sub_norm, has_xpos, has_tokens)
    unknown = sorted(set(state_dict) - {prefix + name for name in expected})
    missing = sorted({prefix + name for name in expected} - set(state_dict))
    if unknown or missing:
        raise ValueError(
            f"`state_dict` must have the names of a LongNet {kind}, got unknown {unknown}, missing {missing}."
        )
    hidden, features = weights["layers.0.ffn.fc1.weight"].shape
    is_tied = kind == "encoder" or np.array_equal(weights["embed_tokens.weight"], weights["output_projection.weight"])
    fields = {
        "num_layers": num_layers,
        "features": features,
        "num_heads": num_heads,
        "vocab_size": weights["embed_tokens.weight"].shape[0] if has_tokens else None,
        "pattern": DilationPattern(segment_lengths, dilation_rates, offsets="block", mixing="detached"),
        "hidden_features": hidden,
        "positions": "xpos" if has_xpos else None,
        "sub_norm": has_sub_norm,
        "use_bias": True,
        "tie_embeddings": is_tied,
        "norm_epsilon": 1e-5,
    }
    if taken := sorted(set(changes) & (set(fields) - {"norm_epsilon"})):
        given = ", ".join(f"`{name}` {shown(changes[name])}" for name in taken)
        raise ValueError(f"fields determined by `state_dict` must not be given, got {given}.")
    config = LongNetConfig(**{**fields, **changes})
    pairs = weights[f"layers.0.{XPOS}"].size if has_xpos else 0
    if has_xpos and 2 * pairs * num_heads != features:
        raise ValueError(f"`num_heads` must be {features} features / (2 * {pairs} of {XPOS}), got {num_heads}.")
    model_class = LongNetDecoder if kind == "decoder" else LongNetEncoder
    empty = nnx.eval_shape(lambda: model_class(config, ring=ring, rngs=nnx.Rngs(0)))
    return _load_params(empty, _parameters(weights, config, has_tokens))


def _prefix_and_kind(state_dict: Mapping[str, ArrayLike], kind: Kind | None) -> tuple[str, Kind]:
    first = "layers.0.self_attn.q_proj.weight"
    prefixes = [name.removesuffix(first) for name in state_dict if name.endswith(first)]
    if len(prefixes) != 1:
        raise ValueError(
            f"`state_dict` must have one name that ends with {first!r}, got {len(prefixes)} of {len(state_dict)}."
        )
    matching = [each for each in get_args(Kind) if each in prefixes[0]]
    kind = matching[0] if kind is None and len(matching) == 1 else kind
    if kind is None or kind not in get_args(Kind):
        raise ValueError(
            f'`kind` must be "decoder" or "encoder" for names with the prefix {prefixes[0]!r}, got {kind!r}.'
        )
    return prefixes[0], kind


def _expected(num_layers: int, kind: Kind, has_sub_norm: bool, has_xpos: bool, has_tokens: bool) -> set[str]:
    """Returns the expected names of a state dict without their prefix."""
    inner = [*LINEARS.values(), *HEADS.values(), *NORMS.values(), OUT]
    inner += [SUB_NORM, HIDDEN_NORM] if has_sub_norm else []
    names = {f"{name}.{leaf}" for name in inner for leaf in ("weight", "bias")} | ({XPOS} if has_xpos else set())
    expected = {f"layers.{i}.{name}" for i in range(num_layers) for name in names}
    expected |= {"layer_norm.weight", "layer_norm.bias"}
    expected |= {"embed_tokens.weight"} if has_tokens else set()
    return expected | ({"output_projection.weight"} if kind == "decoder" else set())


def _parameters(weights: Weights, config: LongNetConfig, has_tokens: bool) -> dict[str, Any]:
    """Returns the parameters of the ringjax model, nested by name."""
    parameters: dict[str, Any] = {"norm": _norm(weights, "layer_norm")}
    if has_tokens:
        parameters["embed"] = {"embedding": weights["embed_tokens.weight"]}
    if not config.tie_embeddings:
        parameters["head"] = {"kernel": weights["output_projection.weight"].T}
    blocks = [_block(weights, f"layers.{i}.", config) for i in range(config.num_layers)]
    parameters["blocks"] = jax.tree.map(lambda *each: np.stack(each), *blocks)
    return parameters


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
        block[ours] = {"kernel": weights[f"{prefix}{theirs}.weight"].T, "bias": weights[f"{prefix}{theirs}.bias"]}
    for ours, theirs in NORMS.items():
        block[ours] = _norm(weights, prefix + theirs)
    if config.sub_norm:
        attention["sub_norm"] = _norm(weights, prefix + SUB_NORM)
        block["hidden_norm"] = _norm(weights, prefix + HIDDEN_NORM)
    return block


def _norm(weights: Weights, name: str) -> dict[str, np.ndarray]:
    return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}


def _load_params(empty: Model, parameters: dict[str, Any]) -> Model:
    """Returns an abstract model with these parameters, nested by name, in the sharding of the model."""
    graph, state = nnx.split(empty)
    shapes, specs = nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))
    given, wanted = (jax.tree.map(np.shape, tree) for tree in (parameters, shapes))
    if given != wanted:
        raise ValueError(
            f"`state_dict` must have arrays of consistent shapes: the model expects {wanted}, got {given}."
        )
    mesh = empty.blocks.attention.core.mesh
    sharding = jax.tree.map(lambda _, spec: None if mesh is None else NamedSharding(mesh, spec), parameters, specs)
    typed = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), parameters, shapes)
    nnx.replace_by_pure_dict(state, jax.tree.map(jax.device_put, typed, sharding))
    return nnx.merge(graph, state)
