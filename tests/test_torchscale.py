"""Converted torchscale weights give the outputs of a plain forward pass of torchscale's layers."""

import math

import jax
import numpy as np
import pytest
from cases import QUICK, error

import ringjax as rj
from ringjax.models import LongNetDecoder, LongNetEncoder, from_torchscale

BATCH, LENGTH, VOCABULARY, LAYERS, FEATURES, HEADS, HIDDEN = 2, 32, 9, 2, 24, 3, 20
DIM = FEATURES // HEADS
SEGMENTS, RATES = (8, 32), (1, 2)
PATTERN = rj.DilationPattern(SEGMENTS, RATES, offsets="block", mixing="detached")
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)


def state_dict(prefix="decoder.", *, subln=True, xpos=True, tokens=True, head=True):
    """Returns weights with the names and shapes of torchscale."""
    linears = {f"self_attn.{name}_proj": (FEATURES, FEATURES) for name in "qkv"}
    linears |= {
        "self_attn.out_proj": (FEATURES, FEATURES),
        "ffn.fc1": (HIDDEN, FEATURES),
        "ffn.fc2": (FEATURES, HIDDEN),
    }
    norms = {"self_attn_layer_norm": FEATURES, "final_layer_norm": FEATURES}
    norms |= {"self_attn.inner_attn_ln": FEATURES, "ffn.ffn_layernorm": HIDDEN} if subln else {}
    shapes = {"layer_norm.weight": (FEATURES,), "layer_norm.bias": (FEATURES,)}
    for i in range(LAYERS):
        for name, shape in {**linears, **{name: (width,) for name, width in norms.items()}}.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            shapes[f"layers.{i}.{name}.bias"] = shape[:1]
    shapes |= {"embed_tokens.weight": (VOCABULARY, FEATURES)} if tokens else {}
    shapes |= {"output_projection.weight": (VOCABULARY, FEATURES)} if head else {}
    rng = np.random.default_rng(0)
    state = {
        prefix + name: (0.4 * rng.standard_normal(shape) + 0.1).astype(np.float32) for name, shape in shapes.items()
    }
    if xpos:
        scale = ((np.arange(0, DIM, 2) + 0.4 * DIM) / (1.4 * DIM)).astype(np.float32)
        state |= {f"{prefix}layers.{i}.self_attn.xpos.scale": scale for i in range(LAYERS)}
    return state


def norm(w, name, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def xpos(x, zeta, is_key):
    """Rotates adjacent dimensions of (B, T, N, H) and scales them with the position."""
    at = np.arange(LENGTH)[:, None]
    angle = at * 10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    scale = zeta ** ((at - LENGTH // 2) / 512)
    scale = 1 / scale if is_key else scale
    rotated = (x[..., ::2] + 1j * x[..., 1::2]) * (scale * np.exp(1j * angle))[None, :, None, :]
    return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)


def forward(state, prefix, x, *, is_causal):
    """Computes all layers of torchscale and the final norm in float64."""
    w = {name.removeprefix(prefix): np.asarray(value, np.float64) for name, value in state.items()}
    for i in range(LAYERS):
        name = f"layers.{i}."
        normed = norm(w, f"{name}self_attn_layer_norm", x)
        q, k, v = (linear(w, f"{name}self_attn.{n}_proj", normed).reshape(BATCH, LENGTH, HEADS, DIM) for n in "qkv")
        if f"{name}self_attn.xpos.scale" in w:
            zeta = w[f"{name}self_attn.xpos.scale"]
            q, k = xpos(q, zeta, is_key=False), xpos(k, zeta, is_key=True)
        with jax.enable_x64(True):
            oracle = jax.jit(
                rj.reference_attention, static_argnums=3, static_argnames="is_causal", compiler_options=QUICK
            )
            attended = oracle(q, k, v, PATTERN, is_causal=is_causal)
        attended = np.asarray(attended).reshape(x.shape)
        if f"{name}self_attn.inner_attn_ln.weight" in w:
            attended = norm(w, f"{name}self_attn.inner_attn_ln", attended)
        x = x + linear(w, f"{name}self_attn.out_proj", attended)
        hidden = linear(w, f"{name}ffn.fc1", norm(w, f"{name}final_layer_norm", x))
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        if f"{name}ffn.ffn_layernorm.weight" in w:
            hidden = norm(w, f"{name}ffn.ffn_layernorm", hidden)
        x = x + linear(w, f"{name}ffn.fc2", hidden)
    return norm(w, "layer_norm", x)


def convert(state, **options):
    return from_torchscale(state, segment_lengths=SEGMENTS, dilation_rates=RATES, num_heads=HEADS, **options)


def run(model, inputs):
    return jax.jit(lambda x: model(x), compiler_options=QUICK)(inputs)  # noqa: PLW0108


@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decoder_gives_the_logits_of_torchscale(is_tied):
    state = state_dict()
    if is_tied:
        state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    model = convert(state)
    assert isinstance(model, LongNetDecoder) and model.config.tie_embeddings == is_tied
    assert (model.config.positions, model.config.pattern) == ("xpos", PATTERN)
    x = state["decoder.embed_tokens.weight"][TOKENS].astype(np.float64)
    expected = forward(state, "decoder.", x, is_causal=True) @ state["decoder.output_projection.weight"].T
    assert error(run(model, TOKENS), expected) <= 2e-6


@pytest.mark.parametrize("subln", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_encoder_gives_the_features_of_torchscale(subln):
    state = state_dict("", subln=subln, xpos=False, tokens=False, head=False)
    model = convert(state, kind="encoder")
    assert isinstance(model, LongNetEncoder) and model.config.sub_norm == subln and model.config.positions is None
    x = np.random.default_rng(2).standard_normal((BATCH, LENGTH, FEATURES)).astype(np.float32)
    assert error(run(model, x), forward(state, "", x.astype(np.float64), is_causal=False)) <= 2e-6


def without(name):
    return {key: value for key, value in state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: convert({**without("decoder.layers.1.ffn.fc2.bias"), "decoder.version": np.ones(1)}),
            r"unknown \['decoder\.version'\], missing \['decoder\.layers\.1\.ffn\.fc2\.bias'\]",
        ),
        (lambda: convert({**state_dict(), "layer_norm.weight": np.ones(1)}), r"unknown \['layer_norm\.weight'\]"),
        (lambda: convert(state_dict(), tie_embeddings=True, dtype=np.float32), "not be given, got `tie_embeddings`"),
        (lambda: convert({}), "one name that ends with 'layers.0.self_attn.q_proj.weight', got 0"),
        (lambda: convert(state_dict("")), '`kind` must be "decoder" or "encoder" .* prefix \'\', got None'),
        (lambda: from_torchscale(state_dict(), SEGMENTS, RATES, 4), "`num_heads` must be 24 features .* got 4"),
        (lambda: convert(state_dict("encoder.", head=False)), "`is_causal` must be True for `positions=.xpos.`"),
        (
            lambda: convert({**state_dict(), "decoder.layer_norm.bias": np.ones(3)}),
            r"`state_dict` must have arrays of consistent shapes: .*, got .*'bias': \(3,\)",
        ),
    ],
)
def test_unsuitable_weights_raise_and_list_the_names(call, text):
    with pytest.raises(ValueError, match=text):
        call()
