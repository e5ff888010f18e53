"""The front door: everything public is documented, and importing does nothing."""

import doctest
import inspect
import subprocess
import sys
import typing

import pytest

import ringjax as rj


@pytest.mark.parametrize("name", rj.__all__)
def test_public_symbols_are_documented_with_an_example(name):
    symbol = getattr(rj, name)
    text = inspect.getdoc(symbol)
    assert text
    if inspect.isclass(symbol) and issubclass(symbol, tuple):
        return  # a result: shown where it is returned
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


@pytest.mark.parametrize("name", [name for name in rj.__all__ if inspect.isfunction(getattr(rj, name))])
def test_annotations_of_public_functions_resolve(name):
    assert "return" in typing.get_type_hints(getattr(rj, name))


def test_importing_and_planning_start_no_backend_and_write_no_environment():
    """One process for all of it: starting one is what it costs."""
    code = """
import os, sys
before = dict(os.environ)
import ringjax as rj
assert "flax" not in sys.modules
import ringjax._src.aot.compile, ringjax._src.aot.schedule, ringjax.aot
assert not {"libtpu", "jax_cuda12_plugin"} & set(sys.modules)
rj.plan(rj.DilationPattern((64,), (1,)), seq_len=64, num_heads=4, head_dim=8, ring_size=2).to_dict()
assert dict(os.environ) == before
import jax
jax.config.update("jax_num_cpu_devices", 3)  # only before a backend starts
assert jax.device_count() == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
