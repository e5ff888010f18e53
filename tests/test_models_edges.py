"""Edge cases of models: small dtypes, NaN in padding, unsuitable caches and weights."""

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


def test_loss_accepts_targets_of_any_integer_dtype():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 300)), jnp.float32)
    weights = jnp.ones((1, 4))
    targets = np.array([[5, 0, 255, 17]])
    expected = -jax.nn.log_softmax(logits)[0, np.arange(4), targets[0]].sum()
    for dtype in (np.uint8, np.int16, np.int32):
        np.testing.assert_allclose(token_loss(logits, jnp.asarray(targets, dtype), weights)[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`targets` must be an integer array, got float32"):
        token_loss(logits, jnp.asarray(targets, jnp.float32), weights)


def test_negative_weights_negate_the_gradient():
    logits, targets = jnp.arange(6.0).reshape(1, 2, 3), jnp.array([[0, 2]])
    loss = lambda logits, sign: token_loss(logits, targets, jnp.full((1, 2), sign))[0]  # noqa: E731
    positive, negative = (jax.grad(loss)(logits, sign) for sign in (1.0, -1.0))
    assert error(positive, -negative) < 1e-6 and jnp.abs(positive).max() > 0.1


def test_generate_with_a_token_dtype_too_small_for_the_vocabulary_raises():
    with pytest.raises(ValueError, match=r"`tokens` must have a dtype that can represent 300 tokens, got uint8"):
        rj.generate(lambda s, t: (jnp.zeros((1, 300)), s), (), jnp.zeros(1, jnp.uint8), 2, greedy=True)


def test_pooling_ignores_nan_in_padding():
    config = config_of(vocab_size=None, input_features=5)
    model, shapes = functional(LongNetEncoder, config)
    vectors = np.random.default_rng(0).standard_normal((1, 24, 5)).astype(np.float32)
    pooled = COMPILE(lambda p, x, n: model(p)(x, seq_len=20, pool=True), static_argnums=2)
    clean = pooled(drawn(shapes), vectors, 20)
    vectors[:, 20:] = np.nan
    np.testing.assert_array_equal(pooled(drawn(shapes), vectors, 20), clean)


def test_cache_of_another_pattern_or_too_small_for_the_prompt_raises():
    layer = DilatedSelfAttention(4, FEATURES, rj.DilationPattern((8,), (1,)), is_causal=True, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 12, FEATURES))
    other = rj.init_cache(rj.DilationPattern((8,), (2,)), batch=1, num_kv_heads=4, head_dim=FEATURES // 4, max_len=16)
    for call in (layer.prefill, layer.extend):
        with pytest.raises(ValueError, match=r"`cache` must be one of the layer's pattern .*got DilationPattern"):
            call(x, other)
    with pytest.raises(ValueError, match=r"`max_len` of a cache must be at least the .* prompt, got 5 and 12"):
        layer.prefill(x, rj.init_cache(layer.core.pattern, batch=1, num_kv_heads=4, head_dim=FEATURES // 4, max_len=5))


@pytest.mark.slow
def test_padding_of_a_chunk_may_exceed_max_len():
    """xPos accepts positions up to `max_len`; padding beyond it has no position."""
    options = {"is_causal": True, "positions": "xpos", "rngs": nnx.Rngs(0)}
    layer = DilatedSelfAttention(4, FEATURES, rj.DilationPattern((8,), (1,)), **options)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, FEATURES)), jnp.float32)
    whole, _ = layer.prefill(
        x, rj.init_cache(layer.core.pattern, batch=1, num_kv_heads=4, head_dim=FEATURES // 4, max_len=8)
    )
    _, cache = layer.prefill(
        x[:, :6], rj.init_cache(layer.core.pattern, batch=1, num_kv_heads=4, head_dim=FEATURES // 4, max_len=8)
    )
    chunk = jnp.pad(x[:, 6:], [(0, 0), (0, 2), (0, 0)])
    out, _ = layer.extend(chunk, cache, [2])
    assert error(out[:, :2], whole[:, 6:]) < 2e-5


def test_decoder_with_input_features_raises():
    with pytest.raises(ValueError, match=r"`input_features` must be None for a decoder, got 5"):
        LongNetDecoder(config_of(input_features=5), rngs=nnx.Rngs(0))
