"""The programs of docs/own-model.md train alike on one device and on both kinds of mesh."""

import re

import jax
import numpy as np
import pytest
from cases import error
from jax.sharding import AxisType
from test_docs import DOCS, blocks

PAGE = DOCS / "own-model.md"
SETUP, NNX, LINEN, EQUINOX, DATA, STOCK, VMAP = (code for _, code in blocks(PAGE, "python"))
KINDS = [AxisType.Auto, AxisType.Explicit]
LIMIT = 1e-5


def run(programs, monkeypatch, kind=AxisType.Auto, is_alone=False):
    """Executes documented programs on a mesh of this kind, or on one device, and returns their variables."""
    make = jax.make_mesh
    namespace = {"__name__": "own_model"}
    with monkeypatch.context() as patch:
        sizes = lambda shape: (1,) * len(shape) if is_alone else shape  # noqa: E731
        patch.setattr(jax, "make_mesh", lambda shape, names: make(sizes(shape), names, (kind,) * len(shape)))
        for code in programs:
            documented = code if kind == AxisType.Explicit else re.sub(r"^rows = .*$", "rows = None", code, flags=re.M)
            exec(compile(documented, str(PAGE), "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def _as_a_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


CASES = [
    pytest.param(NNX, AxisType.Explicit, id="nnx-Explicit"),
    pytest.param(NNX, AxisType.Auto, id="nnx-Auto", marks=pytest.mark.slow),
    *(pytest.param(LINEN, kind, id=f"linen-{kind.name}", marks=pytest.mark.slow) for kind in KINDS),
    *(pytest.param(EQUINOX, kind, id=f"equinox-{kind.name}", marks=pytest.mark.slow) for kind in KINDS),
]


@pytest.mark.parametrize(("program", "kind"), CASES)
def test_training_equals_one_device(program, kind, monkeypatch, tmp_path):
    expected = run([program], monkeypatch, is_alone=True)
    (tmp_path / "ring").mkdir()
    monkeypatch.chdir(tmp_path / "ring")
    got = run([program], monkeypatch, kind)
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=LIMIT)
    leaves = [[np.ravel(x) for x in jax.tree.leaves(ns["params"])] for ns in (got, expected)]
    assert error(*map(np.concatenate, leaves)) < LIMIT
    assert any("data" in x.sharding.spec for x in jax.tree.leaves(got["params"]))


# what the short examples use of the longer ones
SHARED = """
import jax
from flax import nnx
import ringjax as rj
mesh = jax.make_mesh((2, 4), ("data", "ring"))
ring = rj.Ring(mesh, batch_axis="data")
pattern = rj.DilationPattern((16, 64), (1, 4))
"""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_short_examples_equal_one_device(kind, monkeypatch):
    programs = [SHARED, DATA.replace("assert ", "# "), STOCK, VMAP]
    got, expected = run(programs, monkeypatch, kind), run(programs, monkeypatch, is_alone=True)
    for name in ("out", "stock_out", "vmap_out"):
        assert error(np.asarray(got[name]), np.asarray(expected[name])) < LIMIT, name
