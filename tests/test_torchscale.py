"""Converted torchscale weights give the outputs of a plain forward pass of torchscale's layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torchscale_reference as reference
from cases import QUICK, error

import ringjax as rj
from ringjax.models import LongNetDecoder, LongNetEncoder, from_torchscale

BATCH, LENGTH, VOCABULARY, LAYERS, FEATURES, HEADS, HIDDEN = 2, 32, 9, 2, 24, 3, 20
DIM = FEATURES // HEADS
SEGMENTS, RATES = (8, 32), (1, 2)
PATTERN = rj.DilationPattern(SEGMENTS, RATES, offsets="block", mixing="detached", padding="zeros")
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


def exact(state):
    return {name: jnp.asarray(x, jnp.float64) for name, x in state.items()}


def expected_outputs(state, prefix, x, *, is_causal, branches=(SEGMENTS, RATES), num_heads=HEADS):
    """Returns the normalized outputs of torchscale's layers for a batch (B, T, features), in float64."""
    with jax.enable_x64(True):
        run_one = functools.partial(reference.outputs, exact(state), prefix, is_causal=is_causal)
        forward = jax.jit(lambda x: run_one(x, num_heads, *branches), compiler_options=QUICK)
        return np.stack([forward(each) for each in np.asarray(x, np.float64)])


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
    expected = expected_outputs(state, "decoder.", x, is_causal=True) @ state["decoder.output_projection.weight"].T
    assert error(run(model, TOKENS), expected) <= 2e-6


@pytest.mark.parametrize("subln", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_encoder_gives_the_features_of_torchscale(subln):
    state = state_dict("", subln=subln, xpos=False, tokens=False, head=False)
    model = convert(state, kind="encoder")
    assert isinstance(model, LongNetEncoder) and model.config.sub_norm == subln and model.config.positions is None
    x = np.random.default_rng(2).standard_normal((BATCH, LENGTH, FEATURES)).astype(np.float32)
    assert error(run(model, x), expected_outputs(state, "", x, is_causal=False)) <= 2e-6


# Torchscale's shapes: kind, layers, features, heads, hidden features, segments, rates, length.
SHAPES = {
    "small": ("encoder", 2, 24, 3, 20, (8, 16, 64), (1, 2, 4), 45),
    "LongViT": ("encoder", 2, 384, 16, 1536, (64, 128, 256, 512, 1024), (1, 2, 4, 8, 16), 1300),
    "LongNetEncoder": ("encoder", 2, 768, 12, 3072, (2048, 4096, 8192), (1, 2, 4), 2500),
    "LongNetDecoder": ("decoder", 2, 768, 12, 3072, (2048, 4096, 8192), (1, 2, 4), 2500),
}


@pytest.mark.parametrize("name", ["small", *(pytest.param(x, marks=pytest.mark.slow) for x in list(SHAPES)[1:])])
def test_outputs_and_gradients_are_those_of_torchscale_at_any_length(name):
    kind, num_layers, features, num_heads, hidden, segments, rates, length = SHAPES[name]
    rng = np.random.default_rng(0)
    options = {"final_norm": name in ("LongNetEncoder", "LongNetDecoder")}
    if kind == "decoder":
        options["xpos_dim"] = features // num_heads
    state = reference.stack_weights(rng, num_layers, features, hidden, "", **options)
    x, cotangent = rng.standard_normal((2, length, features))
    if kind == "decoder":
        state |= {"embed_tokens.weight": x.astype(np.float32), "output_projection.weight": np.eye(length, features)}

    def with_gradient(forward):
        def loss(x):
            out = forward(x)
            return (out * cotangent).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        types = {"dtype": np.float64, "param_dtype": np.float64}
        model = from_torchscale(state, segments, rates, num_heads, kind=kind, **types)
        weights, is_causal = exact(state), kind == "decoder"

        def ours(x):
            return model.features(x[None], None, segment_ids=None, seq_len=None, positions=None)[0]

        def theirs(x):
            return reference.outputs(weights, "", x, num_heads, segments, rates, is_causal=is_causal)

        (_, out), gradient = with_gradient(ours)(x)
        (_, expected), expected_gradient = with_gradient(theirs)(x)
    assert model.config.final_norm == options["final_norm"]
    assert error(out, expected) <= 1e-9
    assert error(gradient, expected_gradient) <= 1e-9


def test_rows_that_torchscale_misplaces_raise_unless_accepted():
    state = state_dict("", xpos=False, tokens=False, head=False)
    options = {"segment_lengths": (8, 12), "dilation_rates": (1, 8), "num_heads": HEADS, "kind": "encoder"}
    inputs = np.ones((1, 13, FEATURES), np.float32)
    model = from_torchscale(state, **options)
    run(model, inputs[:, :12])
    with pytest.raises(ValueError, match=r"`accept_misplaced` .* must be True .* got branches 12/8 and length 13"):
        model(inputs)
    assert np.isfinite(run(from_torchscale(state, accept_misplaced=True, **options), inputs)).all()


def test_decoding_raises_where_torchscale_would_misplace_rows():
    model = from_torchscale(state_dict(), (8, 12), (1, 8), HEADS)
    with pytest.raises(ValueError, match=r"`accept_misplaced` .* length 20"):
        model.prefill(TOKENS[:, :4], max_len=20)


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
        (lambda: convert({**state_dict(), "decoder.layer_norm.bias": np.full(24, np.nan)}), "finite .*layer_norm.bias"),
        (
            lambda: convert({**state_dict(), "decoder.embed_tokens.weight": ["a"]}),
            "real numbers, got list for 'decoder",
        ),
        (lambda: convert(reference.gigapath_weights(), kind="encoder"), "see `SlideEncoder.from_gigapath`"),
        (lambda: convert({}), "one name that ends with 'layers.0.self_attn.q_proj.weight', got 0"),
        (lambda: convert(state_dict("")), '`kind` must be "decoder" or "encoder" .* prefix \'\', got None'),
        (lambda: from_torchscale(state_dict(), SEGMENTS, RATES, 4), "`num_heads` must be 24 features .* got 4"),
        (lambda: convert(state_dict("encoder.", head=False)), "`is_causal` must be True for `positions=.xpos.`"),
        (
            lambda: convert({**state_dict(), "decoder.layer_norm.bias": np.ones(3)}),
            r"`state_dict` must have arrays of consistent shapes: .*, got .*layer_norm.bias': \(3,\)",
        ),
    ],
)
def test_unsuitable_weights_raise_and_list_the_names(call, text):
    with pytest.raises(ValueError, match=text):
        call()
