"""Every mistake of a caller names the argument, the rule and what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj

PATTERN = rj.DilationPattern((4, 8), (1, 2))
Q = np.zeros((2, 8, 4, 4), np.float32)


def call(q=Q, k=Q, v=Q, pattern=PATTERN, **keywords):
    return rj.dilated_attention(
        *(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v)), pattern, **keywords
    )


BAD_CALLS = {
    "rank": ({"q": Q[0]}, r"`query` must have rank 4 .*\(8, 4, 4\)"),
    "key rank": ({"k": Q[None]}, r"`key` must have rank 4 .*\(1, 2, 8, 4, 4\)"),
    "batch": ({"k": Q[:1], "v": Q[:1]}, r"`key` must have the batch of `query`.*\(1, 8, 4, 4\) and \(2, 8, 4, 4\)"),
    "length": ({"k": Q[:, :4], "v": Q[:, :4]}, r"`key` must have the length of `query`"),
    "dim": ({"k": Q[..., :2], "v": Q[..., :2]}, r"`key` must have the dim of `query`"),
    "value": ({"v": Q[:, :, :2]}, r"`value` must have the shape of `key`, got \(2, 8, 2, 4\) and \(2, 8, 4, 4\)"),
    "heads": ({"k": Q[:, :, :3], "v": Q[:, :, :3]}, r"`query` heads must be a multiple of `key` heads, got 4 and 3"),
    "empty": ({"q": Q[:0], "k": Q[:0], "v": Q[:0]}, r"`query` must not be empty, got shape \(0, 8, 4, 4\)"),
    "dtype": ({"k": Q.astype(np.float16)}, r"`key` must have the dtype of `query`, got float16 and float32"),
    "integer": ({"q": Q.astype(np.int32)}, r"`query` must be floating point, got int32"),
    "list": ({"q": [1.0]}, r"`query` must be an array, got list"),
    "pattern": ({"pattern": (4, 8)}, r"`pattern` must be a DilationPattern, got tuple"),
    "float ids": ({"segment_ids": jnp.zeros((2, 8))}, r"`segment_ids` must be an integer array, got float32"),
    "ids shape": ({"segment_ids": jnp.zeros((2, 4), int)}, r"`segment_ids` must have shape .*\(2, 8\), got \(2, 4\)"),
    "ids list": ({"segment_ids": [0]}, r"`segment_ids` must be an integer array, got list"),
    "seq_len": ({"seq_len": 9}, r"`seq_len` must be between 1 and the stored length 8, got 9"),
    "seq_len 0": ({"seq_len": 0}, r"`seq_len` must be at least 1, got 0"),
    "seq_len float": ({"seq_len": 4.0}, r"`seq_len` must be an integer, got 4.0"),
    "scale": ({"scale": float("nan")}, r"`scale` must be a finite .* of at most 3.4e\+38, got nan"),
    "scale word": ({"scale": "big"}, r"`scale` must be a finite Python number .*got 'big'"),
    "scale beyond float32": ({"scale": 1e39}, r"`scale` must be a finite .* of at most 3.4e\+38, got 1e\+39"),
    "scale beyond floats": ({"scale": -(10**400)}, r"`scale` must be a finite .* of at most 3.4e\+38, got -1000"),
    "scale array": ({"scale": jnp.float32(0.5)}, r"`scale` must be .*\(not a JAX array\) .*, got Array\(0.5"),
    "long ids": (
        {"segment_ids": np.full((2, 8), 2**32 + 5)},
        r"`segment_ids` must fit int32 unless `jax_enable_x64` is set, got int64 from 4294967301 to 4294967301",
    ),
    "rng": ({"dropout_rng": "abc"}, r"`dropout_rng` must be a `jax.random` key \(or None .*\), got 'abc'"),
    "causal": ({"is_causal": 1}, r"`is_causal` must be a bool, got 1"),
    "implementation": ({"implementation": "cuda"}, r"`implementation` must be None or one of .*got 'cuda'"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name):
    keywords, text = BAD_CALLS[name]
    with pytest.raises(ValueError, match=text):
        call(**keywords)


BAD_PATTERNS = {
    "lengths": (((4, 8), (1,)), {}, r"`segment_lengths` and `dilation_rates` must have the same length, got 2 and 1"),
    "empty": (((), ()), {}, r"`segment_lengths` must not be empty, got \(\)"),
    "empty generator": (((x for x in ()), ()), {}, r"`segment_lengths` must not be empty, got \(\)"),
    "w": (((4, 0), (1, 2)), {}, r"`segment_lengths\[1\]` must be at least 1, got 0"),
    "r": (((4, 8), (-1, 2)), {}, r"`dilation_rates\[0\]` must be at least 1, got -1"),
    "float": (((4.0, 8), (1, 2)), {}, r"`segment_lengths\[0\]` must be an integer, got 4.0"),
    "number": ((4, 1), {}, r"`segment_lengths` must be a list of integers, got 4"),
    "offsets": (((4,), (1,)), {"offsets": "odd"}, r"`offsets` must be one of \('mod', 'block', 'none'\), got 'odd'"),
    "heads": (((4,), (1,)), {"heads": "some"}, r"`heads` must be one of \('all', 'split'\), got 'some'"),
    "mixing": (((4,), (1,)), {"mixing": "soft"}, r"`mixing` must be one of \('exact', 'detached'\), got 'soft'"),
    "split heads offsets": (((4,), (1,)), {"heads": "split", "offsets": "block"}, r"`offsets` must be .mod. .*'block'"),
    "split heads mixing": (
        ((4,), (1,)),
        {"heads": "split", "mixing": "detached"},
        r"`mixing` must be .exact. .*'detached'",
    ),
}


@pytest.mark.parametrize("name", BAD_PATTERNS)
def test_bad_pattern(name):
    arguments, keywords, text = BAD_PATTERNS[name]
    with pytest.raises(ValueError, match=text):
        rj.DilationPattern(*arguments, **keywords)


@pytest.mark.parametrize("rows", [[-1], [8], [0.5], 3, [], [True]], ids=str)
def test_bad_rows_of_the_oracle(rows):
    with pytest.raises(ValueError, match=r"`rows` must be a list of positions from 0 to 7, got"):
        rj.reference_attention(jnp.asarray(Q), jnp.asarray(Q), jnp.asarray(Q), PATTERN, rows=rows)


def test_rows_of_the_oracle_are_known_before():
    with pytest.raises(ValueError, match=r"`rows` must be concrete, got"):
        jax.jit(lambda rows: rj.reference_attention(*[jnp.asarray(Q)] * 3, PATTERN, rows=rows))(jnp.arange(2))


def test_long_ids_that_fit_are_taken():
    ids = np.array([[0, 0, 0, 1, 1, 1, -1, -1]] * 2)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(call(segment_ids=ids), call(segment_ids=jnp.asarray(ids, jnp.int32)))


def test_a_backend_that_cannot():
    with pytest.raises(NotImplementedError, match="`implementation='pallas'` does not support this case"):
        call(implementation="pallas")
    assert call(implementation="xla").shape == Q.shape
