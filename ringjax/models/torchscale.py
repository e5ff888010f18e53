"""Conversion of torchscale LongNet weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from ringjax._src.comm.mesh import Ring
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_bool, check_instance, check_int, check_optional, shown
from ringjax.models.config import LongNetConfig, torchscale_pattern
from ringjax.models.model import LongNetDecoder, LongNetEncoder
from ringjax.models.weights import (
    FINAL_NORM,
    SUB_NORM,
    XPOS,
    Shapes,
    Weights,
    check_names,
    check_shapes,
    count_layers,
    load_params,
    read_arrays,
    stack_parameters,
    stack_shapes,
)

Kind = Literal["decoder", "encoder"]
Model = LongNetDecoder | LongNetEncoder
TOKENS, OUTPUT = "embed_tokens.weight", "output_projection.weight"
FIRST = "layers.0.ffn.fc1.weight"


def from_torchscale(
    state_dict: Mapping[str, ArrayLike],
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    num_heads: int,
    *,
    kind: Kind | None = None,
    ring: Ring | None = None,
    accept_misplaced: bool = False,
    **changes: Any,  # noqa: ANN401
) -> Model:
    """Creates a model with the weights of a torchscale `LongNetDecoder` or `LongNetEncoder`.

    The pattern uses torchscale's offsets (``"block"``), mixing (``"detached"``) and padding (``"zeros"``). Sub-norms,
    the final norm of an encoder and xPos are used if the state dict contains them. Torchscale rotates pairs of adjacent
    dimensions, ringjax rotates halves, so the columns of the query and key projections are permuted. Settings that a
    state dict does not contain are assumed to have torchscale's defaults: gelu, pre-norm, unscaled embeddings, and a
    `scale_base` of 512 for xPos.

    Outputs and gradients match torchscale's for sequences of any length, with one exception: if a rate does not divide
    the length of a segment and a sequence has several such segments, torchscale misplaces the rows of all segments but
    the first. A call with such a sequence raises an error, unless `accept_misplaced` is set. An encoder without
    `embed_tokens` takes embeddings as inputs, like torchscale's `token_embeddings`. For the slide encoder of
    Prov-GigaPath, see `SlideEncoder.from_gigapath`.

    Args:
        state_dict: Arrays by name (anything that `numpy.asarray` accepts, and tensors of PyTorch):
            ``layers.0.self_attn.q_proj.weight`` and so on, all with the same prefix, such as ``decoder.``.
        segment_lengths: Torchscale's `segment_length`.
        dilation_rates: Torchscale's `dilated_ratio`.
        num_heads: Number of heads.
        kind: ``"decoder"`` or ``"encoder"``; required if the prefix contains neither word.
        ring: The devices that share the sequence, or None.
        accept_misplaced: Whether to follow the rule of the LongNet paper where torchscale misplaces rows.
        **changes: Further fields of `LongNetConfig`: `dtype`, `remat`, `scan_layers`, `norm_epsilon` (1e-5 by default).

    Returns:
        The model.

    Raises:
        ValueError: If `state_dict` has unknown, missing or inconsistent arrays (the error lists their names) or values
            that are not finite, `kind` is required or unknown, `num_heads` contradicts the state dict, or `changes`
            contain a field that the state dict determines.

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
    check_names(state_dict)
    check_optional(check_instance, "ring", ring, Ring)
    num_heads = check_int("num_heads", num_heads)
    check_bool("accept_misplaced", accept_misplaced)
    prefix, kind = _prefix_and_kind(state_dict, kind)
    weights, has_tokens = _read(state_dict, prefix, kind)
    pairs = weights[f"layers.0.{XPOS}"].size if f"layers.0.{XPOS}" in weights else 0
    hidden, features = weights[FIRST].shape
    fields = {
        "num_layers": count_layers(weights),
        "features": features,
        "num_heads": num_heads,
        "vocab_size": weights[TOKENS].shape[0] if has_tokens else None,
        "pattern": torchscale_pattern(DilationPattern(segment_lengths, dilation_rates)),
        "hidden_features": hidden,
        "positions": "xpos" if pairs else None,
        "sub_norm": f"layers.0.{SUB_NORM}.weight" in weights,
        "final_norm": f"{FINAL_NORM}.weight" in weights,
        "use_bias": True,
        "tie_embeddings": kind == "encoder" or np.array_equal(weights[TOKENS], weights[OUTPUT]),
        "norm_epsilon": 1e-5,
    }
    if taken := sorted(set(changes) & (set(fields) - {"norm_epsilon"})):
        given = ", ".join(f"`{name}` {shown(changes[name])}" for name in taken)
        raise ValueError(f"fields determined by `state_dict` must not be given, got {given}.")
    config = LongNetConfig(**{**fields, **changes})
    if pairs and 2 * pairs * num_heads != features:
        raise ValueError(f"`num_heads` must be {features} features / (2 * {pairs} of {XPOS}), got {num_heads}.")
    parameters = stack_parameters(weights, config)
    if has_tokens:
        parameters["embed"] = {"embedding": weights[TOKENS]}
    if not config.tie_embeddings:
        parameters["head"] = {"kernel": weights[OUTPUT].T}
    model_class = LongNetDecoder if kind == "decoder" else LongNetEncoder
    empty: Model = nnx.eval_shape(lambda: model_class(config, ring=ring, rngs=nnx.Rngs(0)))
    model = load_params(empty, parameters, empty.blocks.attention.core.mesh)
    model.accept_misplaced = accept_misplaced
    return model


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


def _read(state_dict: Mapping[str, ArrayLike], prefix: str, kind: Kind) -> tuple[Weights, bool]:
    """Returns the arrays by name without prefix, checked, and whether tokens are embedded."""
    names = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)}
    has_tokens = kind == "decoder" or TOKENS in names
    expected = _shapes(names, kind, has_tokens, features=1, hidden=1, vocabulary=1, pairs=1)
    unknown = sorted(set(state_dict) - {prefix + name for name in expected})
    missing = sorted({prefix + name for name in expected} - set(state_dict))
    if unknown or missing:
        hint = ""
        if any(name.endswith("patch_embed.proj.weight") for name in state_dict):
            hint = f" (see `SlideEncoder.from_gigapath`, or pass only the names that start with {prefix!r})"
        raise ValueError(
            f"`state_dict` must have the names of a LongNet {kind}{hint}, got unknown {unknown}, missing {missing}."
        )
    weights = read_arrays(state_dict, names, prefix)
    for name in (FIRST, *([TOKENS] if has_tokens else [])):
        if weights[name].ndim != 2:
            raise ValueError(f"`state_dict` must have a matrix {prefix + name!r}, got shape {weights[name].shape}.")
    hidden, features = weights[FIRST].shape
    vocabulary = weights[TOKENS].shape[0] if has_tokens else 0
    pairs = weights[f"layers.0.{XPOS}"].size if f"layers.0.{XPOS}" in weights else 0
    sizes = {"features": features, "hidden": hidden, "vocabulary": vocabulary, "pairs": pairs}
    check_shapes(weights, _shapes(names, kind, has_tokens, **sizes), prefix)
    return weights, has_tokens


def _shapes(
    names: set[str], kind: Kind, has_tokens: bool, *, features: int, hidden: int, vocabulary: int, pairs: int
) -> Shapes:
    """Returns the expected arrays of a state dict with these names, without prefix. An encoder may lack the norm."""
    shapes = stack_shapes(
        count_layers(names),
        features,
        hidden,
        has_sub_norm=f"layers.0.{SUB_NORM}.weight" in names,
        has_final_norm=kind == "decoder" or any(name.startswith(f"{FINAL_NORM}.") for name in names),
        xpos_pairs=pairs if f"layers.0.{XPOS}" in names else 0,
    )
    shapes |= {TOKENS: (vocabulary, features)} if has_tokens else {}
    return shapes | ({OUTPUT: (vocabulary, features)} if kind == "decoder" else {})
