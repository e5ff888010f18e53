"""What models do at the edges: small dtypes, padding that holds NaN, caches and weights that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import error
from flax import nnx
from test_models import COMPILE, FEATURES, config_of, drawn, functional

import ringjax as rj
from ringjax.models import LongNetDecoder, LongNetEncoder, token_loss
from ringjax.nnx import DilatedSelfAttention


def test_loss_takes_targets_of_any_integer_dtype():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 300)), jnp.float32)
    weights = jnp.ones((1, 4))
    targets = np.array([[5, 0, 255, 17]])
    right = -jax.nn.log_softmax(logits)[0, np.arange(4), targets[0]].sum()
    for dtype in (np.uint8, np.int16, np.int32):
        np.testing.assert_allclose(token_loss(logits, jnp.asarray(targets, dtype), weights)[0], right, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`targets` must be an integer array, got float32"):
        token_loss(logits, jnp.asarray(targets, jnp.float32), weights)


def test_negative_weights_push_the_other_way():
    logits, targets = jnp.arange(6.0).reshape(1, 2, 3), jnp.array([[0, 2]])
    loss = lambda logits, sign: token_loss(logits, targets, jnp.full((1, 2), sign))[0]  # noqa: E731
    there, back = (jax.grad(loss)(logits, sign) for sign in (1.0, -1.0))
    assert error(there, -back) < 1e-6 and jnp.abs(there).max() > 0.1


def test_generate_refuses_tokens_that_do_not_hold_the_vocabulary():
    with pytest.raises(ValueError, match=r"`tokens` must have a dtype that holds 300 tokens, got uint8"):
        rj.generate(lambda s, t: (jnp.zeros((1, 300)), s), (), jnp.zeros(1, jnp.uint8), 2, greedy=True)


def test_mean_leaves_out_padding_that_holds_nan():
    config = config_of(vocab_size=None, input_features=5)
    model, shapes = functional(LongNetEncoder, config)
    vectors = np.random.default_rng(0).standard_normal((1, 24, 5)).astype(np.float32)
    pooled = COMPILE(lambda p, x, n: model(p)(x, seq_len=20, pool=True), static_argnums=2)
    clean = pooled(drawn(shapes), vectors, 20)
    vectors[:, 20:] = np.nan
    np.testing.assert_array_equal(pooled(drawn(shapes), vectors, 20), clean)


def test_caches_must_fit_the_layer_and_the_prompt():
    layer = DilatedSelfAttention(4, FEATURES, rj.DilationPattern((8,), (1,)), is_causal=True, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 12, FEATURES))
    other = rj.init_cache(rj.DilationPattern((8,), (2,)), 1, 4, FEATURES // 4, 16)
    for call in (layer.prefill, layer.extend):
        with pytest.raises(ValueError, match=r"`cache` must be one of the layer's pattern .*got DilationPattern"):
            call(x, other)
    with pytest.raises(ValueError, match=r"`max_len` of a cache must be at least the .* prompt, got 5 and 12"):
        layer.prefill(x, rj.init_cache(layer.core.pattern, 1, 4, FEATURES // 4, 5))


@pytest.mark.slow
def test_padding_of_a_chunk_has_no_position():
    """xPos takes positions up to `max_len`: those of padding beyond it are none."""
    options = {"is_causal": True, "positions": "xpos", "rngs": nnx.Rngs(0)}
    layer = DilatedSelfAttention(4, FEATURES, rj.DilationPattern((8,), (1,)), **options)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, FEATURES)), jnp.float32)
    whole, _ = layer.prefill(x, rj.init_cache(layer.core.pattern, 1, 4, FEATURES // 4, 8))
    _, cache = layer.prefill(x[:, :6], rj.init_cache(layer.core.pattern, 1, 4, FEATURES // 4, 8))
    chunk = jnp.pad(x[:, 6:], [(0, 0), (0, 2), (0, 0)])
    out, _ = layer.extend(chunk, cache, [2])
    assert error(out[:, :2], whole[:, 6:]) < 2e-5


def test_decoders_take_no_vectors():
    with pytest.raises(ValueError, match=r"`input_features` must be None for a decoder, got 5"):
        LongNetDecoder(config_of(input_features=5), rngs=nnx.Rngs(0))
