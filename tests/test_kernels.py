"""Kernels of both targets, in interpret mode, equal the oracle within the tolerances of plain XLA."""

import functools
import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NEEDS_KERNELS,
    QUICK,
    Case,
    assert_equals_oracle,
    low_precision_errors,
    on_ring,
    ring_mesh,
    slow_unless,
    with_gradients,
)
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernel_costs import kernel_costs

import ringjax as rj
from ringjax._src.kernels.blocks import given_blocks
from ringjax._src.kernels.dispatch import BACKENDS
from ringjax._src.kernels.interface import AttendConfig
from ringjax._src.kernels.interface import Case as KernelCase
from ringjax._src.kernels.tpu import calls as tpu_calls
from ringjax._src.kernels.tpu import tiling as tpu_tiling

SLOW = pytest.mark.slow
TARGETS = ("interpret_tpu", "interpret_gpu")
NATIVE = pytest.param("native", marks=NEEDS_KERNELS)

# head dims, grouped queries, lengths that no block divides, rates that do not divide segments, all masks and rules
one_entry = functools.partial(Case, batch=1)
CASES = {
    "causal": one_entry(length=300, head_dim=32, segment_lengths=(128, 300), dilation_rates=(1, 2), is_causal=True),
    "segment ids": Case(
        length=272,
        kv_heads=1,
        q_per_kv=4,
        head_dim=64,
        segment_lengths=(272,),
        dilation_rates=(1,),
        ids=True,
        scale=0.2,
    ),
    "one branch": one_entry(
        length=290,
        kv_heads=1,
        q_per_kv=8,
        head_dim=80,
        segment_lengths=(145,),
        dilation_rates=(3,),
        is_causal=True,
        ids=True,
    ),
    "head dim 80": one_entry(
        length=290,
        kv_heads=1,
        q_per_kv=8,
        head_dim=80,
        segment_lengths=(145, 290),
        dilation_rates=(2, 3),
        is_causal=True,
        ids=True,
    ),
    "detached": one_entry(
        length=256,
        head_dim=96,
        segment_lengths=(128, 256),
        dilation_rates=(1, 2),
        rule="detached",
        is_causal=True,
    ),
    "head dim 128": one_entry(
        length=320, head_dim=128, segment_lengths=(320,), dilation_rates=(2,), rule="block", seq_len=301
    ),
    "head dim 256": one_entry(
        length=200, head_dim=256, segment_lengths=(100, 200), dilation_rates=(1, 2), rule="split"
    ),
}


@pytest.mark.parametrize("implementation", ["xla", NATIVE, *TARGETS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name == "one branch")) for name in CASES])
def test_one_device_equals_oracle(name, implementation):
    assert_equals_oracle(CASES[name], "float32", implementations=(implementation,), compiler_options=QUICK)


@pytest.mark.parametrize("implementation", [pytest.param("interpret_tpu", marks=SLOW), "interpret_gpu"])
def test_given_block_sizes_equal_oracle(implementation):
    sizes = rj.BlockSizes(query=128, key=256, grad_query=256, grad_key=128)
    case = one_entry(
        length=600, kv_heads=1, q_per_kv=2, head_dim=32, segment_lengths=(600,), dilation_rates=(1,), is_causal=True
    )
    least = BACKENDS[implementation.removeprefix("interpret_")].limits.min_block
    assert given_blocks(sizes, num_rows=600, q_per_kv=2, least=least, is_bwd=False) == (128, 256)
    attention = functools.partial(rj.dilated_attention, block_sizes=sizes)
    assert_equals_oracle(case, "float32", attention, implementations=(implementation,), compiler_options=QUICK)


@pytest.mark.parametrize("implementation", ["xla", NATIVE, *TARGETS])
def test_rows_with_any_negative_id_attend_to_nothing(implementation):
    shape, ids = (1, 64, 1, 32), np.repeat([0, -1, -2, -7], 16)[None]
    x = jnp.ones(shape)
    pattern = rj.DilationPattern((64,), (1,))
    out, lse = rj.dilated_attention(
        x, x, x, pattern, segment_ids=jnp.asarray(ids), implementation=implementation, return_lse=True
    )
    assert np.isneginf(lse[0, 16:]).all()
    assert np.isfinite(lse[0, :16]).all()
    assert not out[0, 16:].any()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive_equal_oracle(scale):
    case = one_entry(
        length=48, kv_heads=1, head_dim=16, segment_lengths=(48,), dilation_rates=(1,), is_causal=True, scale=scale
    )
    assert_equals_oracle(case, "float32", implementations=("interpret_gpu",), compiler_options=QUICK)


@pytest.mark.parametrize(("q_per_kv", "kind"), [(1, "TPU v5 lite"), pytest.param(2, "TPU v6 lite", marks=SLOW)])
def test_gradients_of_more_rows_than_fit_vmem_equal_oracle(q_per_kv, kind, monkeypatch):
    monkeypatch.setattr(tpu_calls, "_RESIDENT_BYTES", 2 * 128 * 128 * 4)  # two blocks
    monkeypatch.setattr(tpu_tiling, "_device_kind", lambda: kind)
    case = one_entry(
        length=300,
        kv_heads=1,
        q_per_kv=q_per_kv,
        head_dim=16,
        segment_lengths=(300,),
        dilation_rates=(1,),
        is_causal=True,
    )
    attention = functools.partial(rj.dilated_attention, block_sizes=rj.BlockSizes(query=128, key=128))
    assert_equals_oracle(case, "float32", attention, implementations=("interpret_tpu",), compiler_options=QUICK)


class KernelRing(NamedTuple):
    """An attention call on a ring, and the target with which the default suite runs it, if any."""

    case: Case
    layout: str
    strategy: str = "ring"
    default_target: str | None = None


RINGS = {
    "one branch, zigzag": KernelRing(
        one_entry(length=512, q_per_kv=2, head_dim=32, segment_lengths=(512,), dilation_rates=(4,), is_causal=True),
        layout="zigzag",
        default_target="interpret_gpu",
    ),
    "one branch, contiguous": KernelRing(
        one_entry(length=256, head_dim=32, segment_lengths=(256,), dilation_rates=(2,), is_causal=True),
        layout="contiguous",
        default_target="interpret_tpu",
    ),
    "detached": KernelRing(
        one_entry(
            length=1024,
            q_per_kv=2,
            head_dim=32,
            segment_lengths=(128, 1024),
            dilation_rates=(1, 4),
            rule="detached",
            is_causal=True,
        ),
        layout="zigzag",
    ),
    "unaligned": KernelRing(
        one_entry(length=1024, head_dim=32, segment_lengths=(700,), dilation_rates=(3,), is_causal=True, ids=True),
        layout="contiguous",
    ),
    "segment ids": KernelRing(
        Case(length=512, head_dim=32, segment_lengths=(256, 512), dilation_rates=(1, 2), is_causal=True, ids=True),
        layout="contiguous",
    ),
    "not causal, gathered": KernelRing(
        one_entry(length=1024, kv_heads=4, head_dim=32, segment_lengths=(128, 1024), dilation_rates=(1, 4)),
        layout="zigzag",
        strategy="all_gather",
    ),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, target, marks=slow_unless(target == RINGS[name].default_target))
        for name, target in itertools.product(RINGS, TARGETS)
    ],
)
def test_ring_of_four_equals_oracle(name, implementation):
    given = RINGS[name]
    ring = rj.Ring(ring_mesh(4), layout=given.layout, strategy=given.strategy)
    assert_equals_oracle(
        given.case, "float32", on_ring(ring), implementations=(implementation,), compiler_options=QUICK
    )


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("interpret_tpu", jnp.bfloat16),
        ("interpret_gpu", jnp.float16),
        pytest.param(None, jnp.bfloat16, marks=SLOW),
        pytest.param(None, jnp.float16, marks=SLOW),
        pytest.param("interpret_gpu", jnp.bfloat16, marks=SLOW),
    ],
)
def test_low_precision_error_is_at_most_twice_that_of_the_naive_computation(implementation, dtype):
    case = Case(
        length=128, batch=1, q_per_kv=2, head_dim=32, segment_lengths=(128,), dilation_rates=(2,), is_causal=True
    )
    attention = functools.partial(rj.dilated_attention, implementation=implementation)
    ours, naive = low_precision_errors(case, dtype, attention, QUICK)  # the kernels are interpreted
    assert (ours > 0).all()
    assert ours[0] <= 2 * naive[0]
    assert (ours[1:] <= 3 * naive[1:]).all(), (ours, naive)


@pytest.mark.parametrize("implementation", [*TARGETS, NATIVE])
def test_values_in_padding_do_not_change_the_results(implementation):
    case = Case(length=192, batch=1, kv_heads=2, q_per_kv=1, head_dim=32, segment_lengths=(192,), dilation_rates=(1,))
    ids = jnp.where(jnp.arange(192) < 150, 0, -1)[None].astype(jnp.int32)
    clean = [x.at[:, 150:].set(0) for x in case.arrays(np.float32)]
    dirty = [x.at[:, 150:].set(jnp.nan) for x in clean]
    keywords = {"segment_ids": ids, "implementation": implementation, "compiler_options": QUICK}
    both = with_gradients(rj.dilated_attention, case.pattern, **keywords)
    chex.assert_trees_all_equal(both(*clean), both(*dirty))


def test_vmapped_gradient_lowers_for_tpu():
    mapped = jax.vmap(lambda q, k, v, g: gradient(*(x[None] for x in (q, k, v, g))))
    assert KERNEL["tpu"] in exported(mapped, ["tpu"]).mlir_module()


@pytest.mark.parametrize("implementation", [pytest.param("interpret_tpu", marks=SLOW), "interpret_gpu", NATIVE])
def test_vmap_over_the_batch_equals_the_whole_batch(implementation):
    case = Case(length=128, batch=2, kv_heads=2, q_per_kv=1, head_dim=32, segment_lengths=(128,), dilation_rates=(1,))
    q, k, v, _ = case.arrays(np.float32)
    attention = functools.partial(rj.dilated_attention, pattern=case.pattern, implementation=implementation)
    mapped = jax.vmap(lambda *x: attention(*(y[None] for y in x))[0])
    mapped, whole = (jax.jit(f, compiler_options=QUICK)(q, k, v) for f in (mapped, attention))
    np.testing.assert_allclose(mapped, whole, atol=2e-6)


# ------------------------------------------------------------------------------------------- lowering for a platform

KERNEL = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}
PATTERN = rj.DilationPattern((256, 1024), (1, 4))
ONE_BRANCH = rj.DilationPattern((1024,), (4,))  # compiles faster
GPU = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")


def gradient(q, k, v, g, pattern=ONE_BRANCH, **keywords):
    out, pull = jax.vjp(lambda *x: rj.dilated_attention(*x, pattern, is_causal=True, **keywords), q, k, v)
    return out, *pull(g)


def exported(f, platforms, ring=None, dtype=jnp.bfloat16):
    """Exports `f` for these platforms, for arrays of 1024 rows."""
    sharding = None if ring is None else jax.sharding.NamedSharding(ring.mesh, ring.spec())
    q = jax.ShapeDtypeStruct((1, 1024, 4, 64), dtype, sharding=sharding)
    k = jax.ShapeDtypeStruct((1, 1024, 2, 64), dtype, sharding=sharding)
    checks = [export.DisabledSafetyCheck.custom_call(KERNEL["cuda"])]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
        return export.export(jax.jit(f), platforms=platforms, disabled_checks=checks)(q, k, k, q)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("has_ring", [False, True], ids=["one device", "ring"])
def test_gradient_lowers_to_the_kernels_of_the_platform(platform, has_ring):
    mesh = AbstractMesh((4,), ("ring",), abstract_device=GPU if platform == "cuda" else None)
    ring = rj.Ring(mesh, layout="zigzag") if has_ring else None
    text = exported(functools.partial(gradient, pattern=PATTERN, ring=ring), [platform], ring).mlir_module()
    other = KERNEL["cuda" if platform == "tpu" else "tpu"]
    kernels = ("forward", "gradient") if platform == "tpu" else ("forward", "query_gradient", "key_gradient")
    for name in kernels:
        assert f"ringjax_{name}" in text
    assert text.count(f"@{KERNEL[platform]}") >= 2 * len(kernels)
    assert other not in text


@pytest.mark.usefixtures("without_native")  # native CPU kernels cannot be exported
def test_one_exported_program_serves_several_platforms():
    module = exported(gradient, ["cpu", "tpu", "cuda"])
    assert all(kernel in module.mlir_module() for kernel in KERNEL.values())
    arrays = Case(length=1024, batch=1, kv_heads=2, q_per_kv=2, head_dim=64).arrays(jnp.bfloat16)
    called, plain = (jax.jit(f, compiler_options=QUICK)(*arrays) for f in (module.call, gradient))
    chex.assert_trees_all_equal(tuple(called), plain)


@NEEDS_KERNELS
def test_exporting_native_kernels_raises():
    with pytest.raises(
        NotImplementedError, match=r"cannot be exported: use `implementation=\"xla\"` or set RINGJAX_NATIVE=0"
    ):
        exported(gradient, ["cpu"])


def test_kernels_on_a_sharded_batch_without_a_ring_raise():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    q = jax.ShapeDtypeStruct((4, 1024, 2, 64), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
    attention = functools.partial(rj.dilated_attention, pattern=PATTERN)
    with pytest.raises(NotImplementedError, match=r"use explicit axes, .* or pass `ring=Ring\(mesh, axis_name=None"):
        export.export(jax.jit(attention), platforms=["tpu"])(q, q, q)


def test_float16_lowers_without_kernels_for_tpu():
    assert KERNEL["tpu"] not in exported(gradient, ["tpu"], dtype=jnp.float16).mlir_module()
    assert KERNEL["cuda"] in exported(gradient, ["cuda"], dtype=jnp.float16).mlir_module()


# ------------------------------------------------------------------------------------------------- unsupported cases


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (
            KernelCase(dtype="float16", head_dim=64, num_rows=512, q_per_kv=1),
            "tpu",
            "tpu kernels take bfloat16, float32, not float16",
        ),
        (
            KernelCase(dtype="float64", head_dim=64, num_rows=512, q_per_kv=1),
            "gpu",
            "gpu kernels take bfloat16, float16, float32, not float64",
        ),
        (
            KernelCase(dtype="bfloat16", head_dim=512, num_rows=512, q_per_kv=1),
            "gpu",
            "gpu kernels take head dims from 16 to 256, not 512",
        ),
        (
            KernelCase(dtype="bfloat16", head_dim=8, num_rows=512, q_per_kv=1),
            "tpu",
            "tpu kernels take head dims from 16 to 256, not 8",
        ),
        (
            KernelCase(dtype="bfloat16", head_dim=64, num_rows=12, q_per_kv=1),
            "tpu",
            "take at least 16 selected rows per segment or chunk, not 12",
        ),
        (
            KernelCase(dtype="bfloat16", head_dim=64, num_rows=512, q_per_kv=1, ids="int64"),
            "gpu",
            "take segment ids that fit int32, not int64",
        ),
    ],
)
def test_unsupported_cases_name_the_reason(case, target, reason):
    assert reason in BACKENDS[target].limits.unsupported(target, case)


def test_gpu_kernels_without_the_triton_backend_name_the_reason(monkeypatch):
    monkeypatch.setattr("ringjax._src.kernels.pallas_gpu.plgpu", None)
    case = KernelCase(dtype="bfloat16", head_dim=64, num_rows=512, q_per_kv=1)
    config = AttendConfig(is_causal=True, scale=1.0)
    assert "need the Triton backend of Pallas, which jax" in BACKENDS["gpu"].why_not(case, config)


def call(length=64, head_dim=32, dtype=jnp.float32, **keywords):
    q = jnp.ones((1, length, 2, head_dim), dtype)
    return rj.dilated_attention(q, q, q, rj.DilationPattern((length,), (1,)), **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"head_dim": 512, "implementation": "pallas"},
            "does not support this case: the tpu kernels take head dims from 16 to 256",
        ),
        ({"dtype": jnp.float16, "implementation": "interpret_tpu"}, "take bfloat16, float32, not float16"),
        ({"length": 8, "implementation": "interpret_gpu"}, "at least 16 selected rows"),
        ({"implementation": "pallas"}, "`implementation='pallas'` has kernels for tpu and cuda only"),
        (
            {"implementation": "interpret_tpu", "block_sizes": rj.BlockSizes(query=64, key=128)},
            "the tpu kernels take blocks of at least 128 rows, not 64",
        ),
    ],
)
def test_forcing_an_unsupported_implementation_raises(keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(lambda: call(**keywords))()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rj.BlockSizes(query=100, key=64), "`query` must be a power of two of at least 16, got 100"),
        (lambda: rj.BlockSizes(query=128, key=8), "`key` must be a power of two of at least 16, got 8"),
        (lambda: call(block_sizes=(64, 64)), "`block_sizes` must be a BlockSizes, got tuple"),
        (
            lambda: call(block_sizes=rj.BlockSizes(query=64, key=64), implementation="xla"),
            "`block_sizes` must be None with",
        ),
    ],
)
def test_invalid_block_sizes_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unsupported_cases_fall_back_to_xla_by_default():
    for keywords in ({"head_dim": 512}, {"length": 8}):
        fallen_back = jax.jit(lambda keywords=keywords: call(**keywords), compiler_options=QUICK)
        np.testing.assert_allclose(fallen_back(), 1.0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("q_per_kv", [1, 4])
def test_at_least_nine_tenths_of_causal_flops_are_useful(target, q_per_kv):
    size = 1024 if target == "tpu" else 128
    for cost in kernel_costs(target, rows=16 * size, head_dim=128, q_per_kv=q_per_kv, is_causal=True):
        assert 0.9 <= cost.useful_flops / cost.issued_flops < 1, cost


def test_moved_bytes_count_each_loaded_block():
    sizes = rj.BlockSizes(query=256, key=256)
    for cost in kernel_costs("tpu", rows=256, head_dim=64, tasks=3, block_sizes=sizes):
        assert cost.moved_bytes == cost.least_bytes, cost
        assert cost.useful_flops == cost.issued_flops, cost
    full, causal = (
        kernel_costs("tpu", rows=1024, head_dim=64, is_causal=c, block_sizes=sizes)[0] for c in (False, True)
    )
    key_block = 2 * 256 * 64 * 2
    # each of the 4 query blocks loads 4 key blocks, or with a causal mask 1, 2, 3 and 4; one of those is already loaded
    assert full.moved_bytes - full.least_bytes == (16 - 4) * key_block
    assert causal.moved_bytes - causal.least_bytes == (1 + 2 + 3 + 4 - 1 - 4) * key_block
