"""The front door: everything public is documented, and importing does nothing."""

import doctest
import inspect
import subprocess
import sys

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


def test_import_starts_no_backend_and_writes_no_environment():
    code = (
        "import os; before = dict(os.environ); import ringjax; assert dict(os.environ) == before\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"  # only before a backend starts
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
