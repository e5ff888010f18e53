import jax
import pytest

import ringjax as rj

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before any backend starts
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _fresh_cache():
    rj.pattern_cache_clear()


@pytest.fixture
def without_native(monkeypatch):
    """CPUs run plain XLA, as without a compiler."""
    monkeypatch.setenv("RINGJAX_NATIVE", "0")
    jax.clear_caches()  # of functions that were traced with kernels
    yield
    jax.clear_caches()


@pytest.fixture(params=["default", "plain XLA"])
def either_implementation(request):
    """Runs a test twice: with what a CPU runs by default, and with what it runs without a compiler."""
    if request.param == "plain XLA":
        request.getfixturevalue("without_native")
