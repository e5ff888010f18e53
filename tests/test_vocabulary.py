"""Tokens outside the vocabulary, and 64-bit numbers: NaN, -1 or an error, never a plausible number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK
from flax import nnx

import ringjax as rj
from ringjax.models import LongNetConfig, LongNetDecoder, LongNetEncoder, next_token_targets, token_loss
from ringjax.models.vocabulary import lookup

VOCABULARY = 11
PATTERN = rj.DilationPattern((4,), (1,))
CONFIG = LongNetConfig(
    num_layers=1, features=8, num_heads=2, vocab_size=VOCABULARY, pattern=PATTERN, hidden_features=8, sub_norm=False
)
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


@functools.cache
def decoder() -> LongNetDecoder:
    """A decoder with parameters that are drawn by numpy: nothing is compiled."""
    graph, state = nnx.split(nnx.eval_shape(lambda: LongNetDecoder(CONFIG, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(s.dtype), state))


@COMPILE
def loss_and_gradient(logits, targets, weights):
    return jax.value_and_grad(lambda logits: token_loss(logits, targets, weights)[0])(logits)


@pytest.mark.parametrize("target", [-1, -100, 5, 2**31 - 1, -(2**31)])
def test_a_target_outside_the_vocabulary_makes_loss_and_gradient_nan(target):
    logits = np.random.default_rng(0).standard_normal((1, 3, 5)).astype(np.float32)
    targets = np.array([[1, target, 2]], np.int32)
    loss, gradient = loss_and_gradient(logits, targets, np.ones((1, 3), np.float32))
    assert np.isnan(loss)
    assert np.isnan(np.asarray(gradient)).all(axis=2).tolist() == [[False, True, False]]


def test_a_target_of_weight_0_takes_no_part_whatever_it_is():
    logits = np.random.default_rng(0).standard_normal((1, 3, 5)).astype(np.float32)
    weights = np.array([[1, 0, 2]], np.float32)
    given = [loss_and_gradient(logits, np.array([[1, target, 2]], np.int32), weights) for target in (0, -100, 5)]
    assert np.isfinite(given[0][0])
    for loss, gradient in given[1:]:
        np.testing.assert_array_equal(loss, given[0][0])
        np.testing.assert_array_equal(gradient, given[0][1])


@functools.cache
def logits_of():
    graph, state = nnx.split(decoder())
    call = COMPILE(lambda state, tokens, ids: nnx.merge(graph, state)(tokens, segment_ids=ids))
    return lambda tokens, ids: np.asarray(call(state, np.array(tokens, np.int32), ids))


@pytest.mark.parametrize("token", [-1, VOCABULARY, -VOCABULARY - 1, 2**31 - 1])
def test_a_token_outside_the_vocabulary_gives_nan_from_there_on(token):
    tokens = [[0, 1, 2, 3, 4, 5, token, 7]]
    is_nan = np.isnan(logits_of()(tokens, np.zeros((1, 8), np.int32))).all(axis=2)[0]
    assert is_nan[6:].all() and not is_nan[:4].any()  # others of its segment may be NaN too


def test_padding_may_hold_any_token():
    ids = np.array([[0, 0, 0, 0, 0, 0, -1, -1]], np.int32)
    right = logits_of()([[0, 1, 2, 3, 4, 5, 0, 0]], ids)
    np.testing.assert_array_equal(logits_of()([[0, 1, 2, 3, 4, 5, -1, 2**30]], ids)[:, :6], right[:, :6])
    assert np.isfinite(right).all()


def test_tokens_of_the_vocabulary_keep_their_logits_where_they_are_padding():
    ids = np.array([[0, 0, 0, 0, 0, 0, -1, -1]], np.int32)
    three, four = (logits_of()([[0, 1, 2, 3, 4, 5, token, token]], ids)[0, 6] for token in (3, 4))
    assert np.abs(three - four).max() > 0.1


def test_embeddings_and_their_gradient_for_tokens_of_any_dtype():
    graph, state = nnx.split(nnx.eval_shape(lambda: LongNetEncoder(CONFIG, rngs=nnx.Rngs(0))).embed)
    table = np.arange(VOCABULARY * 8, dtype=np.float32).reshape(VOCABULARY, 8)

    def total(table, tokens):
        embed = nnx.merge(graph, jax.tree.map(lambda _: table, state))
        x = lookup(embed, "inputs", tokens, None, None)
        return jnp.where(jnp.isnan(x), 0, x).sum(), x

    both = COMPILE(jax.grad(total, has_aux=True))
    for dtype, low in ((np.int32, -1), (np.uint8, 255)):
        gradient, found = map(np.asarray, both(table, np.array([[low, 3, 3, VOCABULARY, 10]], dtype)))
        assert np.isnan(found[0, [0, 3]]).all()
        np.testing.assert_array_equal(found[0, [1, 2, 4]], table[[3, 3, 10]])
        np.testing.assert_array_equal(gradient[:, 0], np.bincount([3, 3, 10], minlength=VOCABULARY))


def chosen(logits, dtype=np.int32, **keywords):
    step = lambda state, tokens: (jnp.asarray(logits, jnp.float32), state)  # noqa: E731
    return rj.generate(step, (), jnp.zeros(2, dtype), 2, **keywords)[0]


def test_tokens_of_nan_logits_are_minus_one():
    logits = [[0.0, 5.0, 1.0], [0.0, np.nan, 1.0]]
    key = np.zeros(2, np.uint32)

    @COMPILE
    def every(key, heat):
        signed = chosen(logits, greedy=True), chosen(logits, rng=key), chosen(logits, rng=key, top_k=2)
        return *signed, chosen(logits, np.uint8, greedy=True), chosen([[0.0, 9.0]] * 2, rng=key, temperature=heat)

    greedy, drawn, of_two, unsigned, cold = every(key, np.float32(0))
    assert greedy.tolist() == [[1, 1], [-1, -1]]
    for tokens in (drawn, of_two):
        assert (tokens[0] >= 0).all() and (tokens[1] == -1).all()
    assert unsigned.tolist() == [[1, 1], [255, 255]]
    assert cold.tolist() == [[-1, -1], [-1, -1]]
    assert (every(key, np.float32(-1))[-1] == -1).all() and (every(key, np.float32(1e-3))[-1] == 1).all()


def test_known_tokens_beyond_the_vocabulary_are_refused_by_generate():
    step = lambda state, tokens: (jnp.zeros((2, 5)), state)  # noqa: E731
    with pytest.raises(ValueError, match=r"`tokens` must be below the vocabulary size 5, got \[0, 5\]"):
        rj.generate(step, (), np.array([0, 5]), 2, greedy=True)


@pytest.mark.slow
def test_traced_prompts_outside_the_vocabulary_give_minus_one_and_padding_may_be_anything():
    graph, state = nnx.split(decoder())
    make = jax.jit(lambda state, prompt, n: nnx.merge(graph, state).generate(prompt, 3, lengths=n, greedy=True))
    prompt = np.array([[1, 2, 3, 4], [1, -1, 3, 4], [1, 2, -5, 99]], np.int32)
    tokens = np.asarray(make(state, prompt, np.array([4, 4, 2], np.int32)))
    assert (tokens[1] == -1).all() and (tokens[[0, 2]] >= 0).all()
    clean = np.asarray(make(state, np.where(prompt > 10, 0, np.abs(prompt)), np.array([4, 4, 2], np.int32)))
    np.testing.assert_array_equal(tokens[[0, 2]], clean[[0, 2]])
    known = decoder().generate(jnp.asarray(prompt[[0, 2]]), 3, lengths=[4, 2], greedy=True)
    np.testing.assert_array_equal(known, clean[[0, 2]])


LONG = {"two to the 40": 2**40, "minus two to the 40": -(2**40), "beyond uint32": 2**33}


@pytest.mark.parametrize("name", LONG)
def test_64_bit_numbers_are_refused_where_they_would_be_cut(name):
    long = np.full((2, 8), LONG[name])
    for argument, call in {
        "x": lambda: rj.to_layout(long, "zigzag", 2),
        "tokens": lambda: next_token_targets(long),
        "segment_ids": lambda: next_token_targets(np.zeros((2, 8), int), long),
    }.items():
        with pytest.raises(ValueError, match=f"`{argument}` must fit int32 unless `jax_enable_x64` is set, got int64"):
            call()


def test_64_bit_numbers_are_kept_where_jax_keeps_them():
    long = np.arange(8)[None] + 2**40
    with jax.enable_x64(True):
        for call in (lambda x: rj.to_layout(x, "zigzag", 2), lambda x: next_token_targets(x)[0]):
            assert jax.make_jaxpr(lambda call=call: call(long))().out_avals[0].dtype == np.int64
