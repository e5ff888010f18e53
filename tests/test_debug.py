"""With RINGJAX_DEBUG=1 programs report what only they can know; without it nothing is added to them."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, ring_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax._src import debug
from ringjax._src.flax.rotary import xpos
from ringjax.models import token_loss

PATTERN = rj.DilationPattern((4, 8), (1, 2))
Q = np.zeros((2, 8, 2, 4), np.float32)
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture
def reports(monkeypatch, caplog):
    """Sets the variable; returns a function that waits for the reports and gives their texts."""
    monkeypatch.setenv("RINGJAX_DEBUG", "1")
    caplog.set_level(logging.WARNING, "ringjax")

    def texts():
        jax.effects_barrier()
        found = [record.getMessage() for record in caplog.records if record.name == "ringjax"]
        caplog.clear()
        return found

    return texts


def loss(targets):
    return token_loss(jnp.zeros((1, 3, 5)), targets, jnp.ones((1, 3)))


def drawn(heat):
    step = lambda state, tokens: (jnp.zeros((2, 3)), state)  # noqa: E731
    return rj.generate(step, (), jnp.zeros(2, jnp.int32), 2, rng=jnp.zeros(2, jnp.uint32), temperature=heat)[0]


def filled(lengths):
    return rj.prefill(rj.init_cache(PATTERN, 2, 2, 4, 8), jnp.asarray(Q), jnp.asarray(Q), lengths).lengths


def attended(query):
    return rj.dilated_attention(query, query, query, PATTERN, implementation="xla")


PROGRAMS = {
    "token_loss": (loss, np.zeros((1, 3), np.int32)),
    "generate": (drawn, np.float32(1)),
    "prefill": (filled, np.zeros(2, np.int32)),
    "dilated_attention": (attended, Q),
    "xpos": (lambda at: xpos(jnp.asarray(Q), jnp.asarray(Q), at, length=8), np.arange(8, dtype=np.int32)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_added_to_programs_without_the_variable(name, monkeypatch):
    function, given = PROGRAMS[name]
    traced = lambda: str(jax.make_jaxpr(functools.partial(function))(given))  # noqa: E731
    if name == "token_loss":
        monkeypatch.setenv("RINGJAX_DEBUG", "0")
    else:
        monkeypatch.delenv("RINGJAX_DEBUG", raising=False)
    assert "callback" not in traced()
    monkeypatch.setenv("RINGJAX_DEBUG", "1")
    assert "callback" in traced()


def test_targets_outside_the_vocabulary_are_reported(reports):
    call = COMPILE(loss)
    call(np.array([[0, 4, 1]], np.int32))
    assert reports() == []
    call(np.array([[-100, 4, 5]], np.int32))
    assert reports() == ["ringjax: `targets`: 2 values are outside the vocabulary, with a weight."]


def test_traced_numbers_out_of_range_are_clipped_and_reported(reports):
    lengths = COMPILE(filled)(np.array([3, 99], np.int32))
    assert lengths.tolist() == [3, 8]
    assert reports() == ["ringjax: `lengths`: 1 values are outside 0 to 8, and clipped."]


@pytest.mark.parametrize("devices", [1, 2])
def test_reports_come_from_every_device_of_a_shard_map(devices, reports):
    def local(x):
        debug.report_nan(x=x)
        return x

    spec = P("ring")
    call = COMPILE(jax.shard_map(local, mesh=ring_mesh(devices), in_specs=spec, out_specs=spec))
    x = np.array([0, np.nan, np.nan, 1], np.float32)
    call(x)
    assert reports() == [f"ringjax: `x`: {2 // devices} values are NaN."] * devices


def test_reports_of_sharded_arrays_count_all_devices(reports):
    targets = jax.device_put(np.array([[-1, 9, 0, 1]], np.int32), NamedSharding(ring_mesh(2), P(None, "ring")))
    COMPILE(lambda x: token_loss(jnp.zeros((1, 4, 5)), x, jnp.ones((1, 4))))(targets)
    assert reports() == ["ringjax: `targets`: 2 values are outside the vocabulary, with a weight."]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_nan_of_an_attention_and_its_gradient_is_reported(devices, reports):
    ring = rj.Ring(ring_mesh(devices))
    query = np.array(Q)
    query[0, 3, 0, 0] = np.nan
    call = jax.jit(jax.grad(lambda q: rj.dilated_attention(q, Q + 1, Q + 1, PATTERN, ring=ring).sum()))
    call(query)
    found = reports()
    assert "ringjax: `query`: 1 values are NaN." in found
    assert "ringjax: `output`: 4 values are NaN." in found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_nan_inside_a_shard_map_of_the_user_is_reported(devices, reports):
    query = np.array(Q)
    query[0, 3, 0, 0] = np.nan
    f = lambda q: rj.ring_dilated_attention(q, q, q, PATTERN, implementation="xla")  # noqa: E731
    spec = P(None, "ring")
    jax.jit(jax.shard_map(f, mesh=ring_mesh(devices), in_specs=spec, out_specs=spec))(query)
    assert "ringjax: `query`: 1 values are NaN." in reports()
