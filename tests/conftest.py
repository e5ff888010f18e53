import os

import chex
import jax
import pytest

import ringjax as rj

os.environ.setdefault("RINGJAX_COMPILE_SECONDS", "300")  # the machine may be busy with other tests
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # must be set before a backend starts
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Clears counters that would carry over from one test to the next."""
    rj.pattern_cache_clear()
    chex.clear_trace_counter()


@pytest.fixture
def without_native(monkeypatch):
    """Disables the native kernels: CPUs run plain XLA, as on a machine without a compiler."""
    monkeypatch.setenv("RINGJAX_NATIVE", "0")
    jax.clear_caches()  # drop functions traced with kernels
    yield
    jax.clear_caches()


@pytest.fixture(params=["default", "plain XLA"])
def either_implementation(request):
    """Runs a test twice: with the default implementation on a CPU, and with plain XLA."""
    if request.param == "plain XLA":
        request.getfixturevalue("without_native")
