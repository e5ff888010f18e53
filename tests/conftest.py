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


@pytest.fixture(params=["default", "plain XLA"])
def either_implementation(request, monkeypatch):
    """Runs a test twice: with what a CPU runs by default, and with what it runs without a compiler."""
    if request.param == "plain XLA":
        monkeypatch.setenv("RINGJAX_NATIVE", "0")
    jax.clear_caches()  # of functions that were traced with the other
    yield
    jax.clear_caches()
