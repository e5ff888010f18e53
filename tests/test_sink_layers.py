"""Attention sinks of layers and models, in training and in decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, error, ring_mesh
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ringjax as rj
import ringjax.linen
from ringjax.models import LongNetConfig, LongNetDecoder
from ringjax.nnx import DilatedSelfAttention


def layer_with_sinks(ring=None) -> DilatedSelfAttention:
    pattern = rj.DilationPattern((8, 32), (1, 4), padding="zeros")  # causal: as with masked padding
    layer = DilatedSelfAttention(
        4, 16, pattern, num_kv_heads=2, is_causal=True, sinks=True, ring=ring, rngs=nnx.Rngs(0)
    )
    assert not layer.sink_logits[...].any()
    layer.sink_logits[...] = layer.sink_logits[...] + jnp.arange(4.0)
    return layer


def test_layers_learn_sinks_and_decode_with_them():
    layer, x = layer_with_sinks(), np.asarray(Case(length=32, kv_heads=1, head_dim=16).arrays(np.float32)[0][:, :, 0])
    graph, params = nnx.split(layer)
    other = ringjax.linen.DilatedSelfAttention(4, layer.core.pattern, num_kv_heads=2, is_causal=True, sinks=True)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def outputs(params, x):
        layer = nnx.merge(graph, params)
        cache = rj.init_cache(layer.core.pattern, 2, 2, 4, max_len=32)
        prompt, cache = layer.prefill(x[:, :20], cache)
        rest, _ = layer.extend(x[:, 20:], cache)
        loss = lambda params: (nnx.merge(graph, params)(x) ** 2).sum()  # noqa: E731
        return layer(x), jnp.concatenate([prompt, rest], axis=1), jax.grad(loss)(params)

    whole, decoded, grads = outputs(params, x)
    assert error(decoded, whole) < 2e-6
    assert (np.abs(grads.sink_logits[...]) > 1e-3).all()
    in_linen = jax.jit(other.apply, compiler_options=QUICK)({"params": nnx.to_pure_dict(params)}, x)
    assert error(in_linen, whole) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("is_explicit", [False, True])
def test_layers_with_sinks_give_the_same_on_a_ring(is_explicit):
    names = ("ring", "heads")
    mesh = jax.make_mesh((2, 2), names) if is_explicit else ring_mesh(2, 2, names=names)
    x = np.asarray(Case(length=32, kv_heads=1, head_dim=16).arrays(np.float32)[0][:, :, 0])
    whole = np.asarray(layer_with_sinks()(x))
    with jax.set_mesh(mesh):
        ring = rj.Ring(mesh, head_axis="heads")
        layer, cache = layer_with_sinks(ring), rj.init_cache(layer_with_sinks().core.pattern, 2, 2, 4, 32, ring=ring)
        put = lambda x, *names: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))  # noqa: E731
        prompt, cache = layer.prefill(put(x[:, :16], None, "ring"), cache)
        rest, _ = layer.extend(put(x[:, 16:]), cache)
        assert error(layer(put(x, None, "ring")), whole) < 2e-6
        assert error(np.concatenate([prompt, rest], axis=1), whole) < 2e-6


def test_models_have_sinks():
    config = LongNetConfig.tiny(num_layers=3, vocab_size=8, sinks=True)
    model = nnx.eval_shape(lambda: LongNetDecoder(config, rngs=nnx.Rngs(0)))
    assert model.blocks.attention.sink_logits.get_value().shape == (3, 4)
