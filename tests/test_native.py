"""The kernels on CPU: when they are compiled and used, and what happens where they cannot be."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NEEDS_KERNELS, QUICK, Case, assert_equals_oracle, by_definition, error, run

import ringjax as rj
from ringjax._src.kernels.cpu import build, cache

pytestmark = NEEDS_KERNELS

CASE = Case(length=96, segment_lengths=(96,), dilation_rates=(2,), is_causal=True)


def program(**keywords) -> str:
    q, k, v, _ = CASE.arrays(np.float32)
    return jax.jit(lambda *x: rj.dilated_attention(*x, CASE.pattern, **keywords)).lower(q, k, v).as_text()


def test_they_run_unless_told_otherwise(monkeypatch):
    assert "ringjax_forward" in program()
    assert "ringjax_forward" in program(implementation="native")
    assert "ringjax_forward" not in program(implementation="xla")
    monkeypatch.setenv("RINGJAX_NATIVE", "0")
    jax.clear_caches()  # of what was traced with kernels
    assert "ringjax_forward" not in program()
    with pytest.raises(NotImplementedError, match="the CPU kernels are unavailable: RINGJAX_NATIVE=0 is set"):
        program(implementation="native")


def test_what_they_do_not_have():
    with pytest.raises(NotImplementedError, match="`dropout_rate` above 0, as the kernels do not support dropout"):
        program(implementation="native", dropout_rate=0.1, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="`block_sizes` must be None with `implementation='native'`"):
        program(implementation="native", block_sizes=rj.BlockSizes(128, 128))
    with pytest.raises(NotImplementedError, match="the cpu kernels take head dims from 1 to 256, not 300"):
        x = jnp.ones((1, 8, 1, 300))
        rj.dilated_attention(x, x, x, CASE.pattern, implementation="native")


# one task on several threads: the gradients of queries and of keys are two passes; more tasks: one pass
@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype"),
    [
        (1, 3, "float32"),
        (1, 256, "float32"),
        (8, 3, "float32"),
        (8, 40, "float64"),
        pytest.param(1, 40, "float64", marks=pytest.mark.slow),
        pytest.param(8, 256, "float32", marks=pytest.mark.slow),
    ],
)
def test_blocks_tiles_and_widths_that_nothing_divides(kv_heads, dim, dtype):
    case = Case(
        length=1101,
        batch=1,
        kv_heads=kv_heads,
        q_per_kv=2,
        head_dim=dim,
        segment_lengths=(1101,),
        dilation_rates=(3,),
        is_causal=True,
        ids=True,
    )
    assert_equals_oracle(case, dtype, implementations=("native",), compiler_options=QUICK)


@pytest.mark.parametrize("factor", [1e4, 1e-30])
def test_extreme_scores(factor):
    case = CASE._replace(scale=factor)
    for x, right in zip(
        run(rj.dilated_attention, case.arrays(np.float32), case.pattern, **case.keywords(), implementation="native"),
        by_definition(case, case.arrays(np.float32)),
        strict=True,
    ):
        assert np.isfinite(x).all()
        assert error(x, right) < 1e-2  # scores of 1e4 have a rounding of 5e-4


def test_not_a_number_is_not_lost():
    q, k, v, g = CASE.arrays(np.float32)
    payload = np.frombuffer(np.uint32(0x7FC00123).tobytes(), np.float32)[0]  # a NaN whose lower bits are not 0
    for nan in (np.nan, payload):
        out, dq, *_ = run(rj.dilated_attention, (q, k.at[:, 40].set(nan), v, g), CASE.pattern, is_causal=True)
        assert np.isnan(out[:, 40::2, 0]).all() and np.isnan(dq[:, 40::2, 0]).all()  # rows that see the key
        assert not np.isnan(out[:, :40]).any() and not np.isnan(out[:, :, 1]).any()


def test_not_a_number_of_one_branch_is_not_lost_in_another():
    case = Case(length=96, kv_heads=1, segment_lengths=(96, 16), dilation_rates=(1, 1))
    q, k, v, g = case.arrays(np.float32)
    for pattern in (case.pattern, rj.DilationPattern((16, 96), (1, 1))):
        for x in run(rj.dilated_attention, (q, k.at[:, 0].set(np.nan), v, g), pattern, compiler_options=QUICK):
            assert np.isnan(x).all()  # every query sees the key, and every key is seen by such a query


def test_equal_calls_give_equal_bits():
    arrays = Case(length=2048, batch=1, kv_heads=2).arrays(np.float32)
    pattern = rj.DilationPattern((2048,), (1,))
    first, *others = (run(rj.dilated_attention, arrays, pattern, is_causal=True) for _ in range(4))
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_one_pass_and_two_give_equal_bits():
    """One head alone has fewer tasks than threads; among others it has not."""
    arrays = Case(length=1500, batch=1, kv_heads=64, head_dim=16).arrays(np.float32)
    pattern = rj.DilationPattern((1500,), (1,))
    many, one = (run(rj.dilated_attention, x, pattern, is_causal=True) for x in (arrays, [x[:, :, :1] for x in arrays]))
    for x, y in zip(many, one, strict=True):
        np.testing.assert_array_equal(x[:, :, :1], y)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, ringjax as rj
from ringjax._src.kernels.cpu import build, cache
x = jnp.ones((1, 8, 1, 4))
np.testing.assert_array_equal(rj.dilated_attention(x, x, x, rj.DilationPattern((8,), (1,))), x)
print(build.why_not() or "native")
"""


def answer(**environment) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(
        command, check=True, env=environment, capture_output=True, text=True, timeout=300
    ).stdout.strip()


@pytest.mark.slow
def test_compiled_once_and_kept(tmp_path):
    assert answer(XDG_CACHE_HOME=str(tmp_path)) == "native"
    folder = tmp_path / "ringjax"
    (library,) = folder.glob("*.so")
    made = library.stat().st_mtime_ns
    assert folder.stat().st_mode & 0o077 == 0  # nobody else can put a library there
    assert answer(XDG_CACHE_HOME=str(tmp_path)) == "native"
    assert [x.stat().st_mtime_ns for x in folder.glob("*.so")] == [made]
    assert {x.name for x in folder.iterdir()} == {library.name, "lock"}


@pytest.mark.slow
def test_a_damaged_library_is_made_again(tmp_path):
    """Loading one that was cut short would end the process."""
    folder = tmp_path / "ringjax"
    folder.mkdir(mode=0o700)
    for library in next(cache.folders()).glob("*.so"):
        (folder / library.name).write_bytes(library.read_bytes()[:1000])
    assert answer(XDG_CACHE_HOME=str(tmp_path)) == "native"
    assert [library for library in folder.glob("*.so") if library.stat().st_size > 1000]


def test_a_flag_that_the_compiler_does_not_know_is_left_out(tmp_path):
    compiler = tmp_path / "compiler"
    refuse = 'case "$*" in *avoid-fma*|*=native*) echo "unknown flag" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {build._compilers()[0]} "$@"\n')
    compiler.chmod(0o755)
    flags, macros = build._flags(str(compiler), time.monotonic() + 60)
    assert flags == build._FLAGS
    assert "__GNUC__" in macros


@pytest.mark.slow
def test_without_a_compiler_plain_xla_computes(tmp_path):
    reason = answer(XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert reason == "there is no C++ compiler (CXX, c++, g++, clang++)"
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONWARNINGS": "error::UserWarning"}
    with pytest.raises(subprocess.CalledProcessError) as failed:
        answer(**environment, CXX="")
    assert (
        "CPU kernels are unavailable: compiling them failed: this compiler is broken. Plain XLA" in failed.value.stderr
    )
    environment["PYTHONWARNINGS"] = "ignore"
    assert answer(**environment, CXX="") == "compiling them failed: this compiler is broken"
    assert not list(tmp_path.glob("ringjax/*.so"))  # nothing half made is left


def test_a_compiler_that_cannot_is_followed_by_the_next(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert answer(CXX=str(broken)) == "native"


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "ringjax").write_text("a file stands where the folder should")
    assert answer(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path)) == "native"
    assert list(tmp_path.glob("ringjax-*/*.so"))
