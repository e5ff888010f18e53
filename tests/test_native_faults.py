"""What users see of CPU kernels that cannot be compiled, cannot be used or have no memory."""

import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from cases import NEEDS_KERNELS

import ringjax as rj
from ringjax._src.kernels.cpu import build
from ringjax._src.kernels.dispatch import BACKENDS
from ringjax._src.kernels.interface import AttendConfig
from ringjax._src.kernels.interface import Case as KernelCase

pytestmark = NEEDS_KERNELS


def why_not(implementation):
    config = AttendConfig(is_causal=False, scale=1.0, implementation=implementation)
    return BACKENDS["cpu"].why_not(KernelCase("float32", 64, 512, 1), config)


def test_plain_xla_for_want_of_a_compiler_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(build, "why_not", lambda: build.NO_COMPILER)
    monkeypatch.setattr(build, "_warned", set())
    assert why_not("native")  # an error says it
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            assert why_not(None) == f"the CPU kernels are unavailable: {build.NO_COMPILER}"
    (line,) = {str(warning.message) for warning in warned}
    assert len(warned) == 1
    assert line.startswith("CPU kernels are unavailable: there is no C++ compiler (CXX, c++, g++, clang++). Plain XLA")
    assert "up to 2.7 times slower" in line and "RINGJAX_NATIVE=0" in line


def test_plain_xla_that_was_asked_for_is_not_warned_of(monkeypatch):
    monkeypatch.setattr(build, "_warned", set())
    monkeypatch.setenv("RINGJAX_NATIVE", "0")
    assert why_not(None)
    assert not build._warned


@pytest.mark.parametrize("implementation", [None, "native", "xla"])
def test_more_positions_than_int32_can_count_are_refused(implementation):
    x = jax.ShapeDtypeStruct((2**17, 2**15, 1, 16), jnp.bfloat16)
    pattern = rj.DilationPattern((2**15,), (1,))
    with pytest.raises(ValueError, match=r"at most 2147483647 positions .*, got 131072 times 32768"):
        jax.eval_shape(lambda *x: rj.dilated_attention(*x, pattern, implementation=implementation), x, x, x)


NO_MEMORY = """
import ctypes, sys, jax, jax.numpy as jnp, ringjax as rj
x = jnp.ones((1, 2048, 4, 16))
pattern = rj.DilationPattern((2048,), (1,))
call = jax.jit(lambda x: rj.dilated_attention(x, x, x, pattern, implementation="native"))
call(x).block_until_ready()
memory = ctypes.CDLL(sys.argv[1])
for nth in (1, 2):  # on the thread that calls; on one that helps it, or on the next call
    memory.ringjax_fail_allocation(nth)
    try:
        for _ in range(20):
            call(x).block_until_ready()
    except Exception as error:
        print("RESOURCE_EXHAUSTED" in str(error) and "ringjax: out of memory in a CPU kernel" in str(error))
print(bool((call(x) == 1).all()))
"""


def test_no_memory_in_a_kernel_is_an_error_of_xla(tmp_path):
    library, source = tmp_path / "no_memory.so", pathlib.Path(__file__).parent / "native" / "no_memory.cc"
    flags = ["-std=c++17", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run([build._compilers()[0], *flags], check=True, timeout=100)
    environment = os.environ | {"LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", NO_MEMORY, str(library)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["True"] * 3), ran.stderr


# ----------------------------------------------------------------------------------------------------------------- slow

SCRIPT = """
import time, jax, jax.numpy as jnp, ringjax as rj
from ringjax._src.kernels.cpu import build
x = jnp.ones((1, 8, 1, 4))
start = time.monotonic()
reason = build.why_not()
seconds = time.monotonic() - start
rj.dilated_attention(x, x, x, rj.DilationPattern((8,), (1,)))
print(seconds, reason or "native")
"""


def answer(**environment) -> tuple[float, str]:
    """Seconds that the kernels add to the first call, and why there are none."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"} | environment
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=3000)
    seconds, _, reason = ran.stdout.strip().partition(" ")
    return float(seconds), reason


@pytest.mark.slow
def test_sixteen_processes_on_an_empty_cache_compile_once(tmp_path):
    counting = tmp_path / "compiler"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {build._compilers()[0]} "$@"\n')
    counting.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(counting), "RINGJAX_COMPILE_SECONDS": "2000"}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: answer(**environment), range(16)))
    assert [reason for _, reason in answers] == ["native"] * 16
    assert (tmp_path / "calls").read_text().count("attention.cc") == 1


@pytest.mark.slow
def test_with_a_compiler_that_hangs_the_first_call_returns_within_70_seconds(tmp_path):
    hanging = tmp_path / "c++"
    hanging.write_text('#!/bin/sh\ncase "$*" in *" -E "*) echo "#define A 1"; exit 0;; esac\n/bin/sleep 1000 & wait\n')
    hanging.chmod(0o755)
    seconds, reason = answer(
        XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path), CXX="", RINGJAX_COMPILE_SECONDS=""
    )  # the limit of users
    assert reason.startswith(f"{hanging} did not finish in ") and seconds < 70


@pytest.mark.slow
def test_a_process_stopped_while_it_compiles_does_not_block_others(tmp_path):
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "RINGJAX_COMPILE_SECONDS": "2000",
    }
    first = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 1000
        while not list(tmp_path.glob("ringjax/work-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        assert list(tmp_path.glob("ringjax/work-*"))
        _, reason = answer(XDG_CACHE_HOME=str(tmp_path), RINGJAX_COMPILE_SECONDS="2000")
        assert reason == "native"
    finally:
        first.send_signal(signal.SIGCONT)
        first.wait(timeout=3000)


MOUNTED = """
set -e
mkdir {0}/noexec {0}/full
mount -t tmpfs -o noexec,size=64m tmpfs {0}/noexec
mount -t tmpfs -o size=1m tmpfs {0}/full
exec {1} -c "$SCRIPT"
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noexec", "full"])
def test_a_mounted_cache_that_is_noexec_or_full_is_followed_by_the_next(tmp_path, kind):
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"SCRIPT": SCRIPT, "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path / "temporary")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / kind), "RINGJAX_COMPILE_SECONDS": "2000"}
    command = [unshare, "-m", "/bin/sh", "-c", MOUNTED.format(tmp_path, sys.executable)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert ran.stdout.strip().endswith("native"), ran.stderr
    assert [x.parent.parent.name for x in tmp_path.glob("*/ringjax*/*.so")] == ["temporary"]
