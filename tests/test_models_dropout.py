"""Dropout and drop path of models, and the layer-wise decay of the learning rate."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import QUICK, error
from flax import nnx

import ringjax as rj
from ringjax.models import LongNetConfig, LongNetDecoder, LongNetEncoder, SlideEncoder, layer_decay
from ringjax.models.block import Block, ResidualDropout, drop_elements

PATTERN = rj.DilationPattern((8, 16), (1, 2))
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


def config_of(**changes) -> LongNetConfig:
    return LongNetConfig.tiny(
        **{"features": 16, "hidden_features": 16, "pattern": PATTERN, "positions": None, **changes}
    )


@functools.cache
def encoder_of(**changes) -> LongNetEncoder:
    return LongNetEncoder(config_of(**changes), rngs=nnx.Rngs(0))


X = np.random.default_rng(0).standard_normal((32, 16, 16)).astype(np.float32)


def test_dropped_elements_are_zero_and_the_others_are_scaled():
    x = drop_elements(jnp.ones((100, 1000)), jax.random.key(0), 0.25)
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(np.mean(x) - 1) <= 0.01
    assert drop_elements(X, jax.random.key(0), 0.0) is X


def test_drop_path_skips_layers_of_whole_sequences():
    block = Block(config_of(), is_causal=False, ring=None, rngs=nnx.Rngs(0))

    @COMPILE
    def outputs(x):
        dropped = block(x, ResidualDropout(jax.random.key(3), 0.0, jnp.float32(0.5)))
        combinations = []
        for attention, feed_forward in itertools.product((0.0, 2.0), repeat=2):
            after = x + attention * block.attention(block.attention_norm(x), deterministic=True)
            combinations.append(after + feed_forward * (block._feed_forward(after) - after))
        return dropped, jnp.stack(combinations)

    dropped, combinations = outputs(X)
    differences = np.abs(combinations - dropped[None]).max(axis=(2, 3))
    assert np.all(differences.min(0) <= 1e-5)
    assert set(differences.argmin(0)) == {0, 1, 2, 3}


def test_dropout_needs_a_key_and_depends_on_it():
    encoder = encoder_of(dropout_rate=0.2, drop_path_rate=0.3)
    encode = COMPILE(lambda x, key: encoder(x, dropout_rng=key))
    one, same, other = (encode(X, jax.random.key(i)) for i in (1, 1, 2))
    assert error(one, same) == 0 and error(one, other) > 0.1
    plain = COMPILE(encoder)(X)
    assert error(one, plain) > 0.1
    quiet = LongNetEncoder(config_of(dropout_rate=0.2), rngs=nnx.Rngs(0))
    quiet.eval()
    assert error(COMPILE(lambda x: quiet(x, dropout_rng=jax.random.key(1)))(X), plain) <= 1e-6


@pytest.mark.slow
def test_rematerialized_blocks_drop_the_same():
    gradients = []
    for remat in (False, True):
        graph, state = nnx.split(encoder_of(dropout_rate=0.2, drop_path_rate=0.3, remat=remat))
        loss = lambda state: (nnx.merge(graph, state)(X, dropout_rng=jax.random.key(1)) ** 2).mean()  # noqa: B023, E731
        gradients.append(nnx.to_pure_dict(COMPILE(jax.grad(loss))(state)))
    assert max(jax.tree.leaves(jax.tree.map(error, *gradients))) <= 1e-6


def test_slide_encoder_drops_only_with_a_key():
    config = config_of(features=16, input_features=8, dropout_rate=0.2, drop_path_rate=0.3)
    encoder = SlideEncoder(config, rngs=nnx.Rngs(0))
    tiles, coordinates = np.ones((2, 20, 8), np.float32), np.zeros((2, 20, 2), np.int32)
    encode = COMPILE(lambda key: encoder(tiles, coordinates, dropout_rng=key))
    plain = COMPILE(encoder)(tiles, coordinates)
    assert error(plain[0], plain[1]) <= 1e-6
    assert error(encode(jax.random.key(0)), plain) > 0.1


@pytest.mark.parametrize("rate", [-0.1, 1.0, "x"])
@pytest.mark.parametrize("name", ["dropout_rate", "drop_path_rate"])
def test_bad_rates_raise(name, rate):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        config_of(**{name: rate})


@pytest.mark.parametrize("kind", ["slide", "decoder", "inside"])
def test_early_layers_get_smaller_updates(kind):
    if kind == "decoder":
        model = LongNetDecoder(config_of(vocab_size=5), rngs=nnx.Rngs(0))
    else:
        model = SlideEncoder(config_of(input_features=8), rngs=nnx.Rngs(0))
    if kind == "inside":
        model = nnx.Dict(encoder=model, head=nnx.Linear(16, 2, rngs=nnx.Rngs(1)))
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        transformation = optax.chain(optax.sgd(1.0), layer_decay(model, 0.5))
        parameters = nnx.state(model, nnx.Param)
        gradients = jax.tree.map(jnp.ones_like, parameters)
        updates, _ = transformation.update(gradients, transformation.init(parameters), parameters)
    found = {path: -np.asarray(x[...]) for path, x in nnx.to_flat_state(updates)}
    for path, x in found.items():
        if "blocks" in path:
            expected = np.array([0.25, 0.5]).reshape(-1, *(1,) * (x.ndim - 1))
        else:
            expected = 0.125 if {"embed", "cls_token"} & set(path) else 1.0
        assert np.all(x == expected), path
    assert len({x.min() for x in found.values()}) >= 3


def test_layer_decay_refuses_bad_arguments():
    encoder = encoder_of()
    for decay in (0, 1.5, "x", None):
        with pytest.raises(ValueError, match="`decay` must be"):
            layer_decay(encoder, decay)
    with pytest.raises(ValueError, match="`model` must contain an encoder"):
        layer_decay(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 0.5)
    with pytest.raises(ValueError, match="`model` must be"):
        layer_decay(None, 0.5)
    with pytest.raises(ValueError, match="`updates` must have the paths"):
        layer_decay(encoder, 0.5).update({"other": jnp.ones(2)}, optax.EmptyState())
