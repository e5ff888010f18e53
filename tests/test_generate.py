"""Generation: greedy tokens, sampling, one trace for all tokens."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK

import ringjax as rj

COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


def toy_model(num_layers=2, vocabulary=11, width=8, heads=2):
    """Returns a model of embeddings, attention layers and logits: on whole sequences, and step by step."""
    pattern = rj.DilationPattern((4, 16), (1, 2))
    rng = np.random.default_rng(0)
    embed = jnp.asarray(rng.standard_normal((vocabulary, heads, width)), jnp.float32)

    def layers(x, attend):
        for i in range(num_layers):
            x = x + attend(i, x, x * 0.5, jnp.roll(x, i + 1, -1))
        return jnp.einsum("btnh,vnh->btv", x, embed)

    def whole(tokens):
        return layers(embed[tokens], lambda i, q, k, v: rj.reference_attention(q, k, v, pattern, is_causal=True))

    def step(caches, tokens):
        new = list(caches)

        def attend(i, q, k, v):
            out, new[i] = rj.decode_step(new[i], q, k, v)
            return out

        return layers(embed[tokens], attend)[:, -1], tuple(new)

    empty = tuple(
        rj.init_cache(pattern, batch=2, num_kv_heads=heads, head_dim=width, max_len=64) for _ in range(num_layers)
    )
    return whole, step, empty


def test_greedy_generation_equals_the_argmax_for_the_whole_sequence():
    whole, step, caches = toy_model()
    first = jnp.array([3, 7])
    generated, caches = COMPILE(lambda *a: rj.generate(step, *a, 30, greedy=True))(caches, first)
    tokens = np.concatenate([first[:, None], generated], axis=1)
    np.testing.assert_array_equal(COMPILE(whole)(tokens[:, :-1]).argmax(-1), generated)
    assert caches[0].lengths.tolist() == [30, 30]


def test_generate_traces_the_step_once_for_all_tokens_and_calls():
    _, step, caches = toy_model()
    traced_once = chex.assert_max_traces(step, n=1)

    @COMPILE
    def run(caches, tokens, rng, temperature):
        return rj.generate(traced_once, caches, tokens, 40, rng=rng, temperature=temperature, top_k=3)

    for seed in range(3):
        tokens, caches = run(caches, jnp.array([1, 2]), jax.random.key(seed), jnp.float32(0.5 + seed))
    assert tokens.shape == (2, 40)
    assert caches[0].lengths.tolist() == [120, 120]
    assert run._cache_size() == 1


def test_sampling_follows_temperature_and_top_k():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    step = lambda state, tokens: (jnp.tile(logits[None], (tokens.shape[0], 1)), state)  # noqa: E731
    first = jnp.zeros(2000, jnp.int32)

    def shares(**keywords):
        draw = COMPILE(lambda rng: rj.generate(step, (), first, 4, rng=rng, **keywords)[0])
        generated = draw(jax.random.key(0))
        return np.bincount(np.asarray(generated).ravel(), minlength=4) / generated.size

    np.testing.assert_allclose(shares(), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_k=1), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(temperature=0.5), np.array([100, 25, 9, 4]) / 138, atol=0.03)


def test_invalid_arguments_raise_and_name_the_argument():
    step = lambda state, tokens: (jnp.zeros((2, 5)), state)  # noqa: E731
    tokens = jnp.array([0, 1])
    calls = {
        r"`tokens` must be an integer array of shape \(batch,\)": lambda: rj.generate(
            step, (), tokens[:, None], 3, greedy=True
        ),
        r"`num_tokens` must be at least 1": lambda: rj.generate(step, (), tokens, 0, greedy=True),
        r"`rng` must be given unless": lambda: rj.generate(step, (), tokens, 3),
        r"must not be given with `greedy=True`": lambda: rj.generate(step, (), tokens, 3, greedy=True, top_k=2),
        r"`temperature` must be a finite number above 0, got 0": lambda: rj.generate(
            step, (), tokens, 3, rng=jax.random.key(0), temperature=0.0
        ),
        r"`top_k` must be at most the vocabulary size 5, got 6": lambda: rj.generate(
            step, (), tokens, 3, rng=jax.random.key(0), top_k=6
        ),
        r"`step` must return logits of shape \(2, vocabulary\)": lambda: rj.generate(
            lambda s, t: (jnp.zeros(2), s), (), tokens, 3, greedy=True
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
