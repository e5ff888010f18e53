"""Conversion of the weights of Prov-GigaPath's slide encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_int, shown
from ringjax.models.config import LongNetConfig
from ringjax.models.weights import (
    FINAL_NORM,
    SUB_NORM,
    Shapes,
    Weights,
    check_names,
    check_shapes,
    count_layers,
    linear_parameters,
    norm_parameters,
    norm_shapes,
    read_arrays,
    shown_names,
    stack_parameters,
    stack_shapes,
)

PROJECTION, CLS_TOKEN, NORM, ENCODER = "patch_embed.proj", "cls_token", "norm", "encoder."
PARTS = ("patch_embed.", CLS_TOKEN, "norm.", ENCODER)  # other arrays belong to the pretraining decoder or to a head


def convert_gigapath(
    state_dict: Mapping[str, Any], fields: dict[str, Any], pattern: DilationPattern | None
) -> tuple[LongNetConfig, dict[str, Any], tuple[str, ...]]:
    """Returns the config, the parameters nested by name, and the names of unused arrays of a state dict.

    `fields` are fields of the config that override those of `LongNetConfig.gigapath`.
    """
    arrays = check_names(state_dict)
    if isinstance(arrays.get("model"), Mapping):
        arrays = check_names(arrays["model"])
    prefix = _prefix(arrays)
    used = [name for name in arrays if name.startswith(tuple(prefix + part for part in PARTS))]
    weights = read_arrays(arrays, [name.removeprefix(prefix) for name in used], prefix)
    inner = {name.removeprefix(ENCODER): x for name, x in weights.items() if name.startswith(ENCODER)}
    sizes = _sizes(weights, inner, prefix)
    _check_names_and_shapes(weights, prefix, **sizes)
    fields = _fields(fields, sizes, pattern)
    config = LongNetConfig.gigapath(**fields)
    parameters: dict[str, Any] = {
        "encoder": stack_parameters(inner, config),
        "embed": linear_parameters(weights, PROJECTION),
        "cls_token": weights[CLS_TOKEN].reshape(-1),
        "norm": norm_parameters(weights, NORM),
    }
    return config, parameters, tuple(sorted(set(arrays) - set(used)))


def _prefix(arrays: Mapping[str, Any]) -> str:
    first = f"{ENCODER}layers.0.self_attn.q_proj.weight"
    prefixes = [name.removesuffix(first) for name in arrays if name.endswith(first)]
    if len(prefixes) != 1:
        names = shown_names(sorted(arrays))
        raise ValueError(
            f"`state_dict` must be that of Prov-GigaPath's slide encoder, with one name that ends with {first!r}, got "
            f"{len(prefixes)} of {len(arrays)}: {names}."
        )
    return prefixes[0]


def _sizes(weights: Weights, inner: Weights, prefix: str) -> dict[str, Any]:
    """Returns the sizes that the arrays have: those of the projection and of the first layer."""
    found = {}
    for name in (f"{PROJECTION}.weight", f"{ENCODER}layers.0.ffn.fc1.weight"):
        if name not in weights or weights[name].ndim != 2:
            given = f"shape {weights[name].shape}" if name in weights else "no such array"
            raise ValueError(f"`state_dict` must have a matrix {prefix + name!r}, got {given}.")
        found[name] = weights[name].shape
    hidden, features = found[f"{ENCODER}layers.0.ffn.fc1.weight"]
    return {
        "num_layers": count_layers(inner),
        "features": features,
        "hidden_features": hidden,
        "input_features": found[f"{PROJECTION}.weight"][1],
        "sub_norm": f"layers.0.{SUB_NORM}.weight" in inner,
        "final_norm": f"{FINAL_NORM}.weight" in inner,
    }


def _check_names_and_shapes(
    weights: Weights,
    prefix: str,
    *,
    num_layers: int,
    features: int,
    hidden_features: int,
    input_features: int,
    sub_norm: bool,
    final_norm: bool,
) -> None:
    stack = stack_shapes(num_layers, features, hidden_features, has_sub_norm=sub_norm, has_final_norm=final_norm)
    shapes: Shapes = {ENCODER + name: shape for name, shape in stack.items()}
    shapes |= {f"{PROJECTION}.weight": (features, input_features), f"{PROJECTION}.bias": (features,)}
    shapes |= {CLS_TOKEN: (1, 1, features), **norm_shapes(NORM, features)}
    unknown = shown_names(sorted(prefix + name for name in set(weights) - set(shapes)))
    missing = shown_names(sorted(prefix + name for name in set(shapes) - set(weights)))
    if unknown != "[]" or missing != "[]":
        raise ValueError(
            "`state_dict` must have the names of Prov-GigaPath's slide encoder, got unknown "
            f"{unknown}, missing {missing}."
        )
    check_shapes(weights, shapes, prefix)


def _fields(fields: dict[str, Any], sizes: dict[str, Any], pattern: DilationPattern | None) -> dict[str, Any]:
    """Returns the fields of the config: those given and those that the state dict determines."""
    taken = sorted(set(fields) & (set(sizes) | {"vocab_size", "positions", "use_bias"}))
    if taken:
        given = ", ".join(f"`{name}` {shown(fields[name])}" for name in taken)
        raise ValueError(f"fields determined by `state_dict` must not be given, got {given}.")
    num_heads = check_int("num_heads", fields["num_heads"])
    if sizes["features"] % num_heads:
        raise ValueError(f"`num_heads` must divide the {sizes['features']} features of `state_dict`, got {num_heads}.")
    return {**fields, **sizes, **({} if pattern is None else {"pattern": pattern})}
