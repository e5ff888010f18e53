"""The kernels of both targets, interpreted, against the same oracle and with the same tolerances as plain XLA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NARROW,
    NEEDS_KERNELS,
    QUICK,
    Case,
    assert_equals_oracle,
    low_precision_errors,
    on_ring,
    ring_mesh,
    with_gradients,
)
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernel_costs import kernel_costs

import ringjax as rj
from ringjax._src.kernels.backend import Case as KernelCase

SLOW = pytest.mark.slow
TARGETS = ("interpret_tpu", "interpret_gpu")
NATIVE = pytest.param("native", marks=NEEDS_KERNELS)

# head dims, query groups, lengths that no block divides, rates that do not divide segments, all masks and rules
CASES = {
    "causal": Case(300, 1, 2, 1, 32, (128, 300), (1, 2), is_causal=True),
    "ids": Case(272, 2, 1, 4, 64, (272,), (1,), ids=True, scale=0.2),
    "one branch": Case(290, 1, 1, 8, 80, (145,), (3,), is_causal=True, ids=True),
    "dim80": Case(290, 1, 1, 8, 80, (145, 290), (2, 3), is_causal=True, ids=True),
    "detached": Case(256, 1, 2, 1, 96, (128, 256), (1, 2), rule="detached", is_causal=True),
    "dim128": Case(320, 1, 2, 1, 128, (320,), (2,), rule="block", seq_len=301),
    "dim256": Case(200, 1, 2, 1, 256, (100, 200), (1, 2), rule="grouped"),
}
DEFAULT = ("one branch",)


@pytest.mark.parametrize("implementation", ["xla", NATIVE, *TARGETS])
@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=SLOW) for n in CASES])
def test_one_device_equals_oracle(name, implementation):
    assert_equals_oracle(CASES[name], (NARROW,), implementations=(implementation,), compiler_options=QUICK)


@pytest.mark.parametrize("implementation", [pytest.param("interpret_tpu", marks=SLOW), "interpret_gpu"])
def test_one_device_with_blocks_of_ones_own(implementation):
    attention = functools.partial(rj.dilated_attention, block_sizes=rj.BlockSizes(128, 256, 256, 128))
    case = Case(600, 1, 1, 2, 32, (600,), (1,), is_causal=True)
    assert KernelCase("float32", 32, 600, 2).blocks(
        implementation.removeprefix("interpret_"), rj.BlockSizes(128, 256, 256, 128), is_gradient=False
    ) == (128, 256)
    assert_equals_oracle(case, (NARROW,), attention, (implementation,), compiler_options=QUICK)


RINGS = {
    "one branch": (Case(512, 1, 2, 2, 32, (512,), (4,), is_causal=True), "zigzag"),
    "one causal branch": (Case(256, 1, 2, 1, 32, (256,), (2,), is_causal=True), "contiguous"),
    "zigzag": (Case(1024, 1, 2, 2, 32, (128, 1024), (1, 4), rule="detached", is_causal=True), "zigzag"),
    "by_position": (Case(1024, 1, 2, 1, 32, (700,), (3,), is_causal=True, ids=True), "contiguous"),
    "contiguous": (Case(512, 2, 2, 1, 32, (256, 512), (1, 2), is_causal=True, ids=True), "contiguous"),
    "full": (Case(1024, 1, 4, 1, 32, (128, 1024), (1, 4)), "zigzag"),
}


RING_ROWS = [("one branch", "interpret_gpu"), ("one causal branch", "interpret_tpu")]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(*row, marks=() if row in RING_ROWS else SLOW, id="-".join(row))
        for row in itertools.product(RINGS, TARGETS)
    ],
)
def test_ring_of_four_equals_oracle(name, implementation):
    case, layout = RINGS[name]
    ring = rj.Ring(ring_mesh(4), layout=layout, strategy="gather" if name == "full" else "ring")
    assert_equals_oracle(case, (NARROW,), on_ring(ring), (implementation,), compiler_options=QUICK)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("interpret_tpu", jnp.bfloat16),
        ("interpret_gpu", jnp.float16),
        (None, jnp.bfloat16),
        (None, jnp.float16),
        pytest.param("interpret_gpu", jnp.bfloat16, marks=SLOW),
    ],
)
def test_low_precision_error_is_that_of_the_naive_computation(implementation, dtype):
    case = Case(128, 1, 2, 2, 32, segment_lengths=(128,), dilation_rates=(2,), is_causal=True)
    attention = functools.partial(rj.dilated_attention, implementation=implementation)
    ours, naive = low_precision_errors(case, dtype, attention, QUICK)  # the kernels are interpreted
    assert (ours > 0).all()
    assert ours[0] <= 2 * naive[0]
    assert (ours[1:] <= 3 * naive[1:]).all(), (ours, naive)


@pytest.mark.parametrize("implementation", [*TARGETS, NATIVE])
def test_padding_may_hold_anything(implementation):
    case = Case(192, 1, 2, 1, 32, (192,), (1,))
    ids = jnp.where(jnp.arange(192) < 150, 0, -1)[None].astype(jnp.int32)
    clean = [x.at[:, 150:].set(0) for x in case.arrays(np.float32)]
    dirty = [x.at[:, 150:].set(jnp.nan) for x in clean]
    keywords = {"segment_ids": ids, "implementation": implementation, "compiler_options": QUICK}
    both = with_gradients(rj.dilated_attention, case.pattern, **keywords)
    for x, y in zip(both(*clean), both(*dirty), strict=True):
        np.testing.assert_array_equal(x, y)


def test_vmap_lowers_for_tpu():
    mapped = jax.vmap(lambda q, k, v, g: gradient(*(x[None] for x in (q, k, v, g))))
    assert KERNEL["tpu"] in exported(mapped, ["tpu"]).mlir_module()


@pytest.mark.parametrize("implementation", [pytest.param("interpret_tpu", marks=SLOW), "interpret_gpu", NATIVE])
def test_vmap(implementation):
    case = Case(128, 2, 2, 1, 32, (128,), (1,))
    q, k, v, _ = case.arrays(np.float32)
    attention = functools.partial(rj.dilated_attention, pattern=case.pattern, implementation=implementation)
    mapped = jax.vmap(lambda *x: attention(*(y[None] for y in x))[0])
    mapped, whole = (jax.jit(f, compiler_options=QUICK)(q, k, v) for f in (mapped, attention))
    np.testing.assert_allclose(mapped, whole, atol=2e-6)


# ------------------------------------------------------------------------------------------- lowering for a platform

KERNEL = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}
PATTERN = rj.DilationPattern((256, 1024), (1, 4))
ONE_BRANCH = rj.DilationPattern((1024,), (4,))  # compiles sooner
GPU = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")


def gradient(q, k, v, g, pattern=ONE_BRANCH, **keywords):
    out, pull = jax.vjp(lambda *x: rj.dilated_attention(*x, pattern, is_causal=True, **keywords), q, k, v)
    return out, *pull(g)


def exported(f, platforms, ring=None, dtype=jnp.bfloat16):
    """The program of `f` for these platforms, for arrays of 1024 rows."""
    sharding = None if ring is None else jax.sharding.NamedSharding(ring.mesh, ring.spec())
    q = jax.ShapeDtypeStruct((1, 1024, 4, 64), dtype, sharding=sharding)
    k = jax.ShapeDtypeStruct((1, 1024, 2, 64), dtype, sharding=sharding)
    checks = [export.DisabledSafetyCheck.custom_call(KERNEL["cuda"])]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
        return export.export(jax.jit(f), platforms=platforms, disabled_checks=checks)(q, k, k, q)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("on", ["one", "ring"])
def test_gradient_lowers_for_platform(platform, on):
    mesh = AbstractMesh((4,), ("ring",), abstract_device=GPU if platform == "cuda" else None)
    ring = None if on == "one" else rj.Ring(mesh, layout="zigzag")
    text = exported(functools.partial(gradient, pattern=PATTERN, ring=ring), [platform], ring).mlir_module()
    other = KERNEL["cuda" if platform == "tpu" else "tpu"]
    for name in ("forward", "query_gradient", "key_gradient"):
        assert f"ringjax_{name}" in text
    assert text.count(f"@{KERNEL[platform]}") >= 6
    assert other not in text


@pytest.mark.usefixtures("without_native")  # those on CPU are of the machine that compiled them
def test_one_exported_program_serves_several_platforms():
    module = exported(gradient, ["cpu", "tpu", "cuda"])
    assert all(kernel in module.mlir_module() for kernel in KERNEL.values())
    arrays = Case(1024, 1, 2, 2, 64).arrays(jnp.bfloat16)
    for x, y in zip(jax.jit(module.call)(*arrays), jax.jit(gradient)(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@NEEDS_KERNELS
def test_kernels_of_this_machine_are_not_exported():
    with pytest.raises(
        NotImplementedError, match=r"cannot be exported: use `implementation=\"xla\"` or set RINGJAX_NATIVE=0"
    ):
        exported(gradient, ["cpu"])


def test_sharded_batch_without_a_ring_is_told_to_the_kernels():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    q = jax.ShapeDtypeStruct((4, 1024, 2, 64), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
    attention = functools.partial(rj.dilated_attention, pattern=PATTERN)
    with pytest.raises(NotImplementedError, match=r"tell how arrays are sharded, by `ring=Ring\(mesh, batch_axis"):
        export.export(jax.jit(attention), platforms=["tpu"])(q, q, q)


def test_float16_lowers_without_kernels_for_tpu():
    assert KERNEL["tpu"] not in exported(gradient, ["tpu"], dtype=jnp.float16).mlir_module()
    assert KERNEL["cuda"] in exported(gradient, ["cuda"], dtype=jnp.float16).mlir_module()


# ----------------------------------------------------------------------------------------------------------- misfits


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (KernelCase("float16", 64, 512, 1), "tpu", "tpu kernels take bfloat16, float32, not float16"),
        (KernelCase("float64", 64, 512, 1), "gpu", "gpu kernels take bfloat16, float16, float32, not float64"),
        (KernelCase("bfloat16", 512, 512, 1), "gpu", "gpu kernels take head dims from 16 to 256, not 512"),
        (KernelCase("bfloat16", 8, 512, 1), "tpu", "tpu kernels take head dims from 16 to 256, not 8"),
        (KernelCase("bfloat16", 64, 12, 1), "tpu", "take at least 16 selected rows per segment or chunk, not 12"),
        (KernelCase("bfloat16", 64, 512, 1, "int64"), "gpu", "take segment ids that fit int32, not int64"),
    ],
)
def test_misfits_have_reasons(case, target, reason):
    assert reason in case.misfit(target)


def call(length=64, dim=32, dtype=jnp.float32, **keywords):
    q = jnp.ones((1, length, 2, dim), dtype)
    return rj.dilated_attention(q, q, q, rj.DilationPattern((length,), (1,)), **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"dim": 512, "implementation": "pallas"},
            "cannot do this case: the tpu kernels take head dims from 16 to 256",
        ),
        ({"dtype": jnp.float16, "implementation": "interpret_tpu"}, "take bfloat16, float32, not float16"),
        ({"length": 8, "implementation": "interpret_gpu"}, "at least 16 selected rows"),
        ({"implementation": "pallas"}, "`implementation='pallas'` has kernels for tpu and cuda only"),
        (
            {"implementation": "interpret_tpu", "block_sizes": rj.BlockSizes(64, 128)},
            "the tpu kernels take blocks of at least 128 rows, not 64",
        ),
    ],
)
def test_forcing_what_cannot_be_done_raises(keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(lambda: call(**keywords))()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rj.BlockSizes(100, 64), "`query` must be a power of two of at least 16, got 100"),
        (lambda: rj.BlockSizes(128, 8), "`key` must be a power of two of at least 16, got 8"),
        (lambda: call(block_sizes=(64, 64)), "`block_sizes` must be a BlockSizes, got tuple"),
        (lambda: call(block_sizes=rj.BlockSizes(64, 64), implementation="xla"), "`block_sizes` must be None with"),
    ],
)
def test_wrong_block_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_falls_back_when_nothing_is_forced():
    for keywords in ({"dim": 512}, {"length": 8}):
        fallen_back = jax.jit(lambda keywords=keywords: call(**keywords), compiler_options=QUICK)
        np.testing.assert_allclose(fallen_back(), 1.0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("group", [1, 4])
def test_causal_kernels_compute_little_that_is_masked(target, group):
    size = 1024 if target == "tpu" else 128
    for cost in kernel_costs(target, rows=16 * size, head_dim=128, group=group, is_causal=True):
        assert 0.9 <= cost.useful_flops / cost.issued_flops < 1, cost


def test_counted_bytes():
    sizes = rj.BlockSizes(256, 256)
    for cost in kernel_costs("tpu", rows=256, head_dim=64, tasks=3, block_sizes=sizes):
        assert cost.moved_bytes == cost.least_bytes, cost
        assert cost.useful_flops == cost.issued_flops, cost
    full, causal = (
        kernel_costs("tpu", rows=1024, head_dim=64, is_causal=c, block_sizes=sizes)[0] for c in (False, True)
    )
    key_block = 2 * 256 * 64 * 2
    # four query blocks meet four key blocks each; a causal one meets 1, 2, 3 and 4, the first being there already once
    assert full.moved_bytes - full.least_bytes == (16 - 4) * key_block
    assert causal.moved_bytes - causal.least_bytes == (1 + 2 + 3 + 4 - 1 - 4) * key_block
