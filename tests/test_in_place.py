"""TPU kernels that read dilated rows in place: which cases they take, and that results equal the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from cases import QUICK, Case, assert_equals_oracle, error, low_precision_errors, slow_unless
from jax import export

import ringjax as rj
from ringjax._src.kernels.blocks import Blocks, kernel_config
from ringjax._src.kernels.interface import AttendConfig, Operands
from ringjax._src.kernels.tpu import in_place
from ringjax._src.rows.selection import RowSelection, frozen
from ringjax._src.rows.sizes import xla_block_sizes

BLOCKS = rj.BlockSizes(query=128, key=128)
CASES = {
    "several blocks": Case(length=512, batch=1, head_dim=128, segment_lengths=(512,), dilation_rates=(2,)),
    "two branches, several segments": Case(
        length=512, batch=2, kv_heads=4, head_dim=128, segment_lengths=(128, 256), dilation_rates=(1, 2), is_causal=True
    ),
    "grouped queries": Case(
        length=512, q_per_kv=2, head_dim=128, segment_lengths=(256, 512), dilation_rates=(1, 2), is_causal=True
    ),
    "block offsets": Case(
        length=512, batch=1, kv_heads=4, head_dim=128, segment_lengths=(512,), dilation_rates=(2,), rule="block"
    ),
    "no offsets": Case(
        length=512, batch=1, kv_heads=4, head_dim=128, segment_lengths=(512,), dilation_rates=(2,), rule="none"
    ),
    "rows that do not fill blocks": Case(
        length=640, batch=1, head_dim=128, segment_lengths=(320,), dilation_rates=(2,), is_causal=True
    ),
    "shorter last segment": Case(
        length=640, batch=1, head_dim=128, segment_lengths=(512,), dilation_rates=(2,), is_causal=True
    ),
}


def reasons(monkeypatch):
    """Returns the list to which every call adds why its rows are packed, or ""."""
    found = []

    def recorded(*arguments, **keywords):
        found.append(why_packed(*arguments, **keywords))
        return found[-1]

    why_packed = in_place.why_packed
    monkeypatch.setattr(in_place, "why_packed", recorded)
    return found


@pytest.mark.parametrize("name", [pytest.param(x, marks=slow_unless(x == "several blocks")) for x in CASES])
def test_rows_read_in_place_equal_oracle(name, monkeypatch):
    found = reasons(monkeypatch)
    attention = functools.partial(rj.dilated_attention, block_sizes=BLOCKS)
    assert_equals_oracle(CASES[name], "float32", attention, implementations=("interpret_tpu",), compiler_options=QUICK)
    assert found and not any(found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two branches, several segments", "grouped queries", "block offsets"])
def test_tasks_that_share_a_step_equal_oracle(name):
    assert_equals_oracle(CASES[name], "float32", implementations=("interpret_tpu",), compiler_options=QUICK)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=slow_unless(x == "several blocks")) for x in (*list(CASES)[:4], "no offsets")]
)
def test_pairs_of_bfloat16_heads_are_at_most_twice_as_inaccurate_as_the_naive_computation(name, monkeypatch):
    found = reasons(monkeypatch)
    attention = functools.partial(rj.dilated_attention, implementation="interpret_tpu", block_sizes=BLOCKS)
    ours, naive = low_precision_errors(CASES[name], jnp.bfloat16, attention, QUICK)
    assert found and not any(found), found
    assert (ours > 0).all()
    assert ours[0] <= 2 * naive[0]
    assert (ours[1:] <= 3 * naive[1:]).all(), (ours, naive)


def test_single_step_of_bfloat16_rows_is_interpreted():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 2, 128), jnp.bfloat16) for i in range(3))
    pattern = rj.DilationPattern((256,), (2,))
    out = rj.dilated_attention(q, k, v, pattern, implementation="interpret_tpu")
    exact = rj.reference_attention(*(x.astype(jnp.float32) for x in (q, k, v)), pattern)
    assert error(out.astype(jnp.float32), exact) < 5e-3


@pytest.mark.parametrize("is_mapped", [pytest.param(False, marks=pytest.mark.slow, id="batch"), True])
def test_gradient_lowers_for_tpu_and_reads_in_place(is_mapped):
    pattern = rj.DilationPattern((256, 1024), (1, 4))

    def gradient(q, k, v, g):
        return jax.vjp(lambda *x: rj.dilated_attention(*x, pattern, is_causal=True), q, k, v)[1](g)

    if is_mapped:
        one_entry = gradient
        gradient = jax.vmap(lambda *x: one_entry(*(y[None] for y in x)))
    q = jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16)
    text = export.export(jax.jit(gradient), platforms=["tpu"])(q, q, q, q).mlir_module()
    assert "ringjax_forward_in_place" in text
    assert "ringjax_gradient_in_place" in text


ROWS = RowSelection(
    branch=0,
    segment_length=4096,
    rate=4,
    first=0,
    chunks=2,
    chunk_length=4096,
    num_rows=1024,
    is_aligned=True,
    heads=frozen(range(4)),
    offsets=frozen(range(4)),
    counts=frozen([1024] * 4),
    blocks=xla_block_sizes(1024, 1),
    is_ragged=False,
    has_empty_heads=False,
)


def reason(
    *, length=8192, heads=4, q_per_kv=1, dim=128, dtype="bfloat16", is_bwd=True, ids=False, order=None, **fields
):
    """Returns why rows are packed."""
    shape = jax.ShapeDtypeStruct
    rows = dataclasses.replace(ROWS, **{"heads": frozen(order or range(heads)), **fields})
    kv = shape((1, length, heads, dim), dtype)
    given_ids = shape((1, length), jnp.int32) if ids else None
    operands = Operands(shape((1, length, heads, q_per_kv, dim), dtype), (kv, kv), rows, None, given_ids, given_ids)
    config = kernel_config(operands, AttendConfig(is_causal=True, scale=1.0), Blocks(512, 512))
    return in_place.why_packed(operands, config, is_bwd=is_bwd)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_bwd": False},
        {"dtype": "float32", "heads": 3},
        {"q_per_kv": 4},
        {"dtype": "float32", "q_per_kv": 3},
        {"length": 32768, "chunks": 2, "chunk_length": 16384, "num_rows": 4096},
        {"rate": 1, "num_rows": 4096},
        {"first": 4096, "chunks": 1},
        {"offsets": jnp.arange(4)},
    ],
    ids=str,
)
def test_rows_are_read_in_place(fields):
    assert reason(**fields) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_aligned": False}, "segments must be whole and every head must select rows"),
        ({"has_empty_heads": True}, "segments must be whole and every head must select rows"),
        ({"length": 8194}, "the rate must divide the length and the segments"),
        ({"ids": True}, "segment ids need packed rows"),
        ({"dim": 64}, "the head dim must be 128"),
        ({"dim": 256}, "the head dim must be 128"),
        ({"order": [1, 0, 2, 3]}, "the branch must have all heads"),
        ({"heads": 3}, "16-bit heads must form pairs"),
        ({"q_per_kv": 3}, "16-bit heads must form pairs"),
        ({"chunk_length": 4000, "num_rows": 1000}, "rows must fill whole tiles"),
        ({"length": 65536, "chunk_length": 32768, "num_rows": 8192}, "the rows of a task must fit the vector memory"),
    ],
    ids=str,
)
def test_rows_are_packed(fields, message):
    assert reason(**fields) == message
