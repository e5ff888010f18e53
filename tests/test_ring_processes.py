"""The ring over processes of their own, and what becomes of it when one of them dies."""

import re
import time

import processes
import pytest
from processes import ProcessError, run_processes
from test_processes import assert_none_left, python

SCRIPT = """
import os, signal
print("pid", os.getpid())
import jax
import numpy as np
import ringjax as rj
from processes import initialize_from_environment

initialize_from_environment()
size, rank = len(jax.devices()), jax.process_index()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ring",))
ring = rj.Ring(mesh, layout="zigzag", strategy="ring")
sharding = jax.sharding.NamedSharding(mesh, ring.spec())
pattern = rj.DilationPattern((64,), (2,))
rng = np.random.default_rng(0)
q, k, v, g = (rng.standard_normal((2, 64, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
quick = {"xla_backend_optimization_level": 0}


def both(attention, q, k, v, g):
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, pattern, is_causal=True), q, k, v)
    return out, *pull(g)


def on_ring(q, k, v, g):
    return both(lambda *a, **b: rj.dilated_attention(*a, ring=ring, **b), q, k, v, g)


def on_mesh(x):
    stored = np.asarray(rj.to_layout(x, "zigzag", size))
    return jax.make_array_from_callback(stored.shape, sharding, lambda index: stored[index])


given = [on_mesh(x) for x in (q, k, v, g)]
print("ready")
"""

COMPARE = """
expected = jax.jit(lambda *a: both(rj.reference_attention, *a), compiler_options=quick)(q, k, v, g)
got = jax.jit(on_ring, compiler_options=quick)(*given)
for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected):
    assert x.sharding.is_equivalent_to(sharding, 4), (name, x.sharding)
    right = np.asarray(rj.to_layout(np.asarray(y), "zigzag", size))
    assert len(x.addressable_shards) == int(os.environ["RINGJAX_LOCAL_DEVICES"])
    for shard in x.addressable_shards:
        assert shard.data.shape[1] * size == 64
        error = np.abs(np.asarray(shard.data) - right[shard.index]).max() / max(1, np.abs(right).max())
        assert error <= 2e-6, (name, shard.index, error)
        print("right", name, shard.index[1].start // (64 // size))
"""


@pytest.mark.parametrize(
    ("num_processes", "devices", "strategy"),
    [
        (2, 2, "ring"),
        *(
            pytest.param(num, devices, strategy, marks=pytest.mark.slow)
            for num, devices, strategy in (
                (4, 1, "ring"),
                (2, 2, "all_to_all"),
                (4, 1, "all_to_all"),
                (4, 1, "all_to_all_ring"),
                (4, 1, "auto"),
            )
        ),
    ],
)
def test_equals_oracle(num_processes, devices, strategy):
    assert_equals_oracle(SCRIPT.replace('strategy="ring"', f"strategy={strategy!r}"), num_processes, devices)


@pytest.mark.slow
def test_teams_within_processes_equal_oracle():
    script = SCRIPT.replace(
        'np.array(jax.devices()), ("ring",)', 'np.array(jax.devices()).reshape(2, 2), ("node", "device")'
    )
    script = script.replace('strategy="ring"', 'strategy="all_to_all_ring", axis_name=("node", "device")')
    assert script.count('"node"') == 2
    assert_equals_oracle(script, num_processes=2, devices=2)


def assert_equals_oracle(script, num_processes, devices):
    results = run_processes(python(script, COMPARE), num_processes, devices_per_process=devices)
    right = [line for result in results for line in re.findall(r"^right (\w+) (\d)$", result.output, re.MULTILINE)]
    assert sorted(right) == sorted((name, str(i)) for name in ("out", "dq", "dk", "dv") for i in range(4))
    assert_none_left(results, num_processes)


def test_a_killed_process_ends_the_ring(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 3.0)
    work = """
    import time
    print("at", time.time())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    jax.block_until_ready(jax.jit(on_ring, compiler_options=quick)(*given))
    print("passed")
    """
    with pytest.raises(ProcessError) as caught:
        run_processes(python(SCRIPT, work), 2, timeout=60)
    ended, results = time.time(), caught.value.results
    killed = float(re.search(r"^at (.*)$", results[1].output, re.MULTILINE)[1])
    assert ended - killed < 3 + 5
    assert results[1].returncode == -9
    assert results[0].returncode != 0
    assert not any("passed" in result.output for result in results)
    assert str(caught.value).startswith("Rank 1 failed first.\n")
    assert_none_left(results, 2)
