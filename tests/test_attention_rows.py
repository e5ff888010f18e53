"""The weights of chosen rows equal the softmax of the definition, and multiply the values as attention does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, TOLERANCE, Case, count_matrix, error

import ringjax as rj

CASES = [
    Case(length=24, segment_lengths=(8, 24), dilation_rates=(1, 3), kv_heads=3),
    Case(length=27, segment_lengths=(10, 18), dilation_rates=(2, 3), rule="block", is_causal=True, q_per_kv=2),
    Case(length=22, segment_lengths=(8, 40), dilation_rates=(5, 2), rule="none", ids=True, scale=0.3),
    Case(length=28, segment_lengths=(8, 12, 14), dilation_rates=(1, 2, 3), rule="split", kv_heads=5, is_causal=True),
    Case(length=24, segment_lengths=(8, 16), dilation_rates=(1, 2), rule="detached", seq_len=19, ids=True, q_per_kv=3),
]


def expected_rows(
    case: Case, query, key, *, zero_keys: bool = False, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights (B, T, N, T) and the lse (B, T, N) of all queries in float64, with numpy.

    With `zero_keys` or `sinks` (N,), their weight is added as one more key.
    """
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    counts = np.repeat(count_matrix(case), case.q_per_kv, axis=1)  # (B, N, T, T)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = scale * np.einsum("bpnh,bsnh->bnps", query, np.repeat(key, case.q_per_kv, axis=2))
    if zero_keys or sinks is not None:
        counts = np.concatenate([counts, np.ones_like(counts[..., :1])], axis=-1)
        scores = np.concatenate([scores, np.zeros_like(scores[..., :1])], axis=-1)
    if zero_keys:
        counts[..., -1] = np.repeat(num_zero_keys(case), case.q_per_kv, axis=1)
    if sinks is not None:
        scores[..., -1] = sinks[None, :, None]
    totals = (counts * np.exp(scores)).sum(-1)
    weights = counts * np.exp(scores) / np.where(totals > 0, totals, 1)[..., None]
    with np.errstate(divide="ignore"):
        return weights.transpose(0, 2, 1, 3), np.log(totals).transpose(0, 2, 1)


def num_zero_keys(case: Case) -> np.ndarray:
    """Counts in plain loops the zero keys that torchscale's padding adds for each query: (B, K, T)."""
    count = np.zeros((case.batch, case.kv_heads, case.length), int)
    ids = case.keywords()["segment_ids"]
    for b in range(case.batch):
        length = case.length if case.seq_len is None else case.seq_len
        length = length if ids is None else int((np.asarray(ids[b, :length]) >= 0).sum())
        for w, r in zip(np.minimum(case.segment_lengths, length), case.dilation_rates, strict=True):
            for h, p in np.ndindex(case.kv_heads, length):
                offset = h // -(-case.kv_heads // r) if case.rule == "block" else h % r
                if p % w % r == offset:
                    padded = range(offset, -(-w // r) * r, r)  # the selected positions of the padded segment
                    count[b, h, p] += sum(j >= w or p // w * w + j >= length for j in padded)
    return count


def computed(case: Case, query, key, lse, rows):
    call = functools.partial(rj.attention_rows, pattern=case.pattern, rows=rows, **case.keywords())
    return jax.jit(call, compiler_options=QUICK)(query, key, lse)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.rule)
def test_rows_equal_the_softmax_of_the_definition(case, dtype):
    rows = [case.length - 1, 0, 5, 10]
    with jax.enable_x64(dtype == "float64"):
        query, key, _, _ = case.arrays(dtype)
        weights, lse = expected_rows(case, query, key)
        found = computed(case, query, key, jnp.asarray(lse, dtype), rows)
        assert found.dtype == dtype
        assert found.shape == (case.batch, len(rows), query.shape[2], case.length)
        assert error(found, weights[:, rows]) <= TOLERANCE[dtype]
        sums = np.asarray(found.sum(-1))
        assert np.abs(sums - (np.exp(lse[:, rows]) > 0)).max() <= TOLERANCE[dtype]  # 1, or 0 for rows without keys
    if case.rule in ("none", "split", "detached"):
        assert (sums == 0).any()


def test_zero_keys_and_sinks_take_the_rest_of_the_weight():
    """The log-sum-exp is that of `dilated_attention`."""
    case = Case(length=27, segment_lengths=(10, 27), dilation_rates=(2, 3), rule="block", kv_heads=4)
    sinks = np.linspace(-1, 1, 4)
    for zero_keys in (True, False):
        with jax.enable_x64(True):
            pattern = dataclasses.replace(case.pattern, padding="zeros" if zero_keys else "masked")
            query, key, value, _ = case.arrays(np.float64)

            @functools.partial(jax.jit, compiler_options=QUICK, static_argnums=3)
            def rows(query, key, value, pattern, sinks):
                sinks = {} if pattern.padding == "zeros" else {"sink_logits": sinks}
                out, lse = rj.dilated_attention(query, key, value, pattern, return_lse=True, **sinks)
                return out, rj.attention_rows(query, key, lse, pattern, rows=np.arange(case.length))

            out, found = rows(query, key, value, pattern, sinks)
            expected, _ = expected_rows(case, query, key, zero_keys=zero_keys, sinks=None if zero_keys else sinks)
            assert error(found, expected[..., :-1]) < TOLERANCE["float64"]
            assert error(out, np.einsum("bpns,bsnh->bpnh", found, value)) < TOLERANCE["float64"]
            assert (np.asarray(found.sum(-1)) < 0.9).any()


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda c: c.rule)
def test_weighted_values_are_the_attention_output(case):
    with jax.enable_x64(True):
        query, key, value, _ = case.arrays(np.float64)

        @functools.partial(jax.jit, compiler_options=QUICK)
        def both(query, key, value):
            options = {"pattern": case.pattern, **case.keywords()}
            out, lse = rj.dilated_attention(query, key, value, return_lse=True, implementation="xla", **options)
            return out, rj.attention_rows(query, key, lse, rows=np.arange(case.length), **options)

        out, weights = both(query, key, value)
        expected = np.einsum("bpns,bsnh->bpnh", weights, np.repeat(value, case.q_per_kv, axis=2))
        divisor = len(case.segment_lengths) if case.rule == "split" else 1
        assert error(out, expected / divisor) <= TOLERANCE["float64"]


def test_low_precision_rows_are_float32():
    case = Case(length=24, segment_lengths=(8, 24), dilation_rates=(1, 3), kv_heads=3)
    query, key, _, _ = case.arrays(jnp.bfloat16)
    weights, lse = expected_rows(case, query, key)
    found = computed(case, query, key, jnp.asarray(lse, jnp.float32), [0, 23])
    assert found.dtype == jnp.float32
    assert error(found, weights[:, [0, 23]]) <= TOLERANCE["float32"]


def test_nan_in_padding_has_no_weight():
    case = CASES[-1]
    query, key, _, _ = case.arrays(np.float32)
    weights, lse = expected_rows(case, query, key)
    query, key = (x.at[:, case.seq_len :].set(jnp.nan) for x in (query, key))
    rows = jnp.arange(case.length)
    found = computed(case, query, key, jnp.asarray(lse, np.float32).at[:, case.seq_len :].set(-jnp.inf), rows)
    assert error(found, weights) <= TOLERANCE["float32"]


def test_traced_rows_outside_the_sequence_have_no_weight():
    case = Case(length=16, kv_heads=1, batch=1, segment_lengths=(16,), dilation_rates=(1,))
    query, key, _, _ = case.arrays(np.float32)
    weights, lse = expected_rows(case, query, key)
    lse = jnp.asarray(lse, np.float32)
    call = jax.jit(lambda rows: rj.attention_rows(query, key, lse, case.pattern, rows=rows), compiler_options=QUICK)
    found = np.asarray(call(jnp.array([-1, 3, 16])))
    assert error(found[:, 1], weights[:, 3]) <= TOLERANCE["float32"]
    assert not found[:, [0, 2]].any()


def test_memory_is_proportional_to_rows_times_length():
    """Temporaries are a few times the result: no array of T times T, none of T times heads times T."""
    length, heads, num_rows = 4096, 4, 8
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)] * 2
    lse = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
    pattern = rj.DilationPattern((512, 4096), (1, 4))
    call = jax.jit(lambda q, k, lse: rj.attention_rows(q, k, lse, pattern, rows=np.arange(num_rows)))
    memory = call.lower(*shapes, lse).compile().memory_analysis()
    assert memory.output_size_in_bytes == num_rows * heads * length * 4
    assert memory.temp_size_in_bytes <= 4 * memory.output_size_in_bytes
