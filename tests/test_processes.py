import os
import re
import sys
import textwrap
import time

import processes
import pytest
from processes import ProcessError, initialize_from_environment, run_processes

JOIN = """
import os, signal, time
print("pid", os.getpid())
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from processes import initialize_from_environment

initialize_from_environment()
size, rank = len(jax.devices()), jax.process_index()
mesh = jax.make_mesh((size,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, P("ring"))
x = jax.make_array_from_callback((2 * size,), sharding, lambda index: np.arange(2.0 * size, dtype=np.float32)[index])
hops = [(i, (i + 1) % size) for i in range(size)]
shift = jax.shard_map(lambda x: jax.lax.ppermute(x, "ring", hops), mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
shift = jax.jit(shift)
"""

RING = """
assert len(jax.local_devices()) == int(os.environ["RINGJAX_LOCAL_DEVICES"])
expected = np.roll(np.arange(2.0 * size, dtype=np.float32), 2)
for shard in shift(x).addressable_shards:
    np.testing.assert_array_equal(shard.data, expected[shard.index])
    print("device", shard.index[0].start // 2, "of", size, "holds", np.asarray(shard.data).tolist())
"""


def python(*scripts):
    return [sys.executable, "-c", "".join(textwrap.dedent(script) for script in scripts)]


def is_running(pid):
    """Whether a process is there; one that waits to be reaped is not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_none_left(results, count):
    pids = [int(pid) for result in results for pid in re.findall(r"^pid (\d+)$", result.output, re.MULTILINE)]
    assert len(pids) == count
    patience = time.monotonic() + 5  # a killed grandchild is reaped by init
    while any(map(is_running, pids)) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def failure(command, num_processes, **options):
    start = time.monotonic()
    with pytest.raises(ProcessError) as caught:
        run_processes(command, num_processes, **options)
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_ring_over_processes(num_processes, devices):
    results = run_processes(python(JOIN, RING), num_processes, devices_per_process=devices)
    assert [(result.rank, result.returncode) for result in results] == [(rank, 0) for rank in range(num_processes)]
    held = [re.findall(r"^device (\d) of 4 holds (.*)$", result.output, re.MULTILINE) for result in results]
    assert all(len(lines) == devices for lines in held)
    assert sorted(line for lines in held for line in lines) == [
        ("0", "[6.0, 7.0]"),
        ("1", "[0.0, 1.0]"),
        ("2", "[2.0, 3.0]"),
        ("3", "[4.0, 5.0]"),
    ]
    assert_none_left(results, num_processes)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_process_ends_the_others(victim, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 4.0)
    work = f"""
    shift(x).block_until_ready()
    print("joined at", time.time())
    if rank == {victim}:
        time.sleep(0.5)  # the others are waiting in their next shift
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        x = shift(x).block_until_ready()
    """
    error, _ = failure(python(JOIN, work), 3, timeout=60)
    ended = time.time()
    joined = [
        float(t) for result in error.results for t in re.findall(r"^joined at (.*)$", result.output, re.MULTILINE)
    ]
    assert len(joined) == 3
    assert ended - max(joined) < 0.5 + 4 + 3
    assert error.results[victim].returncode == -9
    assert all(result.returncode != 0 for result in error.results)
    assert str(error).startswith(f"Rank {victim} failed first.\n")
    assert f"Rank {victim} exited with code -9:" in str(error)
    assert_none_left(error.results, 3)


def test_the_first_failure_is_named():
    script = """
    import os, sys
    if os.environ["RINGJAX_PROCESS_ID"] == "1":
        sys.exit("out of luck")
    """
    error, elapsed = failure(python(script), 2)
    assert elapsed < 5
    assert [result.returncode for result in error.results] == [0, 1]
    assert str(error).splitlines()[0] == "Rank 1 failed first."
    assert str(error).splitlines()[1] == "Rank 1 exited with code 1:"
    assert str(error).splitlines()[-1] == "    out of luck"
    assert "Rank 0" not in str(error)


SLEEP = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pid", os.getpid())
print("pid", child.pid)
"""


def test_timeout_ends_grandchildren_too():
    error, elapsed = failure(python(SLEEP, "child.wait()"), 2, timeout=2)
    assert 2 <= elapsed < 5
    assert [result.returncode for result in error.results] == [-9, -9]
    assert str(error).startswith("Not all processes exited within 2 seconds.\n")
    assert_none_left(error.results, 4)


def test_nothing_is_left_of_a_process_that_ended():
    assert_none_left(run_processes(python(SLEEP, "os._exit(0)"), 2), 4)


def test_nothing_is_left_after_an_interrupt(monkeypatch, tmp_path):
    script = f"""
    import os, time
    open({str(tmp_path)!r} + "/" + str(os.getpid()), "w").close()
    time.sleep(600)
    """

    def interrupt(seconds):
        sleep(0.01)
        if len(os.listdir(tmp_path)) == 2:
            raise KeyboardInterrupt

    sleep = time.sleep
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes.time, "sleep", interrupt)
        run_processes(python(script), 2, timeout=20)
    assert not any(is_running(pid) for pid in os.listdir(tmp_path))


def test_environment_of_the_processes():
    script = "import os; print(*(os.environ[n] for n in ('A', 'JAX_PLATFORMS', 'RINGJAX_NUM_PROCESSES')))"
    (result,) = run_processes(python(script), 1, env={"A": "a"})
    assert result.output == "a cpu 1\n"


@pytest.mark.parametrize(
    "missing", ["RINGJAX_COORDINATOR", "RINGJAX_NUM_PROCESSES", "RINGJAX_PROCESS_ID", "RINGJAX_LOCAL_DEVICES"]
)
def test_a_missing_variable_is_named(missing, monkeypatch):
    for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "LOCAL_DEVICES"):
        monkeypatch.setenv(f"RINGJAX_{name}", "1")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"`{missing}` must be set in the environment"):
        initialize_from_environment()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((["true"], 0), {}, "`num_processes` must be at least 1, got 0."),
        ((["true"], 1), {"devices_per_process": 1.5}, "`devices_per_process` must be an integer, got 1.5."),
        ((["true"], 1), {"timeout": 0}, "`timeout` must be positive, got 0."),
        (("true", 1), {}, "`command` must be a list of a program and its arguments, got 'true'."),
        (([], 1), {}, "`command` must be a list of a program and its arguments, got []."),
    ],
)
def test_errors(arguments, options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        run_processes(*arguments, **options)
