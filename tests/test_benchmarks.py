"""The benchmark harness: its cases against the oracle, its workers, its report."""

import json
import math
import pathlib
import subprocess
import sys

import cases
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))  # its modules import each other by their short names

import harness  # noqa: E402
import report  # noqa: E402
import summary  # noqa: E402
import workers  # noqa: E402
import workloads  # noqa: E402


def tiny(case: workloads.Case, length: int = 256) -> cases.Case:
    """A measured case with fewer tokens, as the tests state theirs."""
    small = case.smaller(case.length // length)
    return cases.Case(
        length=small.length,
        batch=small.batch,
        kv_heads=small.heads,
        segment_lengths=small.segment_lengths,
        dilation_rates=small.dilation_rates,
        rule="grouped" if small.grouped else "mod",
        is_causal=small.causal,
    )


QUICK = ("8K, one branch per head", "reaching segments")


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in workloads.NAMED]
)
def test_what_is_measured_equals_the_oracle(name):
    cases.assert_equals_oracle(tiny(workloads.NAMED[name], length=128))


@pytest.mark.parametrize("name", workloads.NAMED)
def test_flops_count_pairs(name):
    case = workloads.NAMED[name]
    counts = cases.count_matrix(tiny(case))
    pairs = float(counts.sum())
    assert case.smaller(case.length // 256).flops(False) == pytest.approx(4 * case.dim * pairs, rel=1e-12)
    assert case.flops(True) == pytest.approx(3.5 * case.flops(False))


def test_constant_work_per_token():
    short, long = (workloads.constant(length, causal=False) for length in (8192, 2**20))
    assert long.flops(True) / long.length == pytest.approx(short.flops(True) / short.length)
    short, long = (workloads.reaching(length, causal=False) for length in (16384, 2**20))
    assert long.flops(True) / long.length == pytest.approx(short.flops(True) / short.length, rel=0.02)


def test_exponents_and_means():
    assert [harness.rotated("abc", i) for i in (0, 2, 3)] == [["a", "b", "c"], ["c", "a", "b"], ["a", "b", "c"]]
    assert harness.exponent([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx(1)
    assert harness.exponent([1, 2, 4], [1, 4, 16]) == pytest.approx(2)
    assert harness.geometric_mean([0.5, 2.0, math.nan]) == pytest.approx(1)


@pytest.fixture(scope="module")
def bench():
    bench = harness.Bench(on_cpu=True, shrink=32, memory=3 * 2**30)
    yield bench
    bench.close()


def test_race_compares_times_and_measures_memory(bench):
    contenders = {
        "one": harness.Contender("one device"),
        "ring": harness.Contender("ring", devices=2),
        "dense": harness.Contender("dense", is_same=False),
    }
    results = bench.race(workloads.LONGEST, False, contenders, memory=True)
    for result in results.values():
        assert not result.failure
        assert len(result.times) == bench.repeats
        assert min(result.times) <= result.median <= max(result.times)
        assert result.bytes >= 3 * 128 * 8 * 64 * 4  # q, k and v
    assert 0 < results["ring"].facts["error"] < 2e-5
    assert "error" not in results["dense"].facts
    wrong = {**contenders, "dense": harness.Contender("dense")}
    with pytest.raises(SystemExit, match=r"dense differs by .*not the same computation"):
        bench.race(workloads.LONGEST, False, wrong)


def test_a_peer_without_memory_is_recorded_and_the_rest_goes_on(bench):
    too_long = workloads.dense(bench.shrink * 65536)
    big = harness.Contender("dense", is_peer=True, is_same=False)
    results = bench.race(too_long, False, {"big": big})
    assert results["big"].failure == "out of memory"
    assert math.isnan(results["big"].median)
    after = bench.race(workloads.LONGEST, False, {"one": harness.Contender("one device"), "big": big})
    assert not any(result.failure for result in after.values())


def test_a_worker_that_is_asked_nonsense_says_so():
    worker = workers.Worker("jax_worker.py")
    with pytest.raises(workers.Failure, match="KeyError"):
        worker.ask("dance")
    assert worker.ask("info")["platform"] == "cpu"
    worker.close()
    assert not worker.is_alive


def test_report(tmp_path):
    rows = [
        {"tokens": 4096, "a s": 0.5, "against PyTorch": 0.93, "memory against PyTorch": 1.5},
        {"tokens": 8192, "a s": 1234.5, "against PyTorch": 1.25, "memory against PyTorch": math.nan},
        {"tokens": "mean", "a s": "out of memory"},
    ]
    plot = harness.Plot("tokens", ["a s"], "seconds")
    table = harness.Table("some", "Some figures", "About them.", rows, plot, run="today")
    facts = {
        "when": "today",
        "minutes": 3.2,
        "command": "make bench",
        "devices": "CPU devices",
        "versions": {"jax": "1"},
    }
    facts["machine"] = {"processor": "x", "cores": 2, "memory_GiB": 3, "python": "3"}
    report.write(tmp_path / "results.json", facts, [table])
    assert json.loads((tmp_path / "results.json").read_text())["tables"][0]["rows"][1]["memory against PyTorch"] is None
    text = report.write_report(tmp_path / "report.md", *report.read(tmp_path / "results.json")).read_text()
    assert "| 4,096 | 0.50 | 0.93 † | 1.50 |\n| 8,192 | 1,234 | 1.25 |  |\n| mean | out of memory |  |  |" in text
    assert "† behind this peer" in text
    assert "Measured on CPU devices by `make bench` and `make bench-full`" in text
    assert (tmp_path / "some.png").stat().st_size > 5000


def test_a_table_takes_its_place_in_the_report():
    one, two, three = (harness.Table(name, name, "", []) for name in ("one", "two", "three"))
    assert report.with_table([one, two], three, after="one") == [one, three, two]
    assert report.with_table([one, two], three, after=None) == [one, two, three]
    again = harness.Table("one", "one again", "", [])
    assert report.with_table([one, two], again, after="two") == [again, two]


@pytest.mark.parametrize("part", ["dance", "ring:dance"])
def test_unknown_parts_are_refused(part):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--parts", f"scaling:cache,{part}"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.endswith(f"--parts must be of compare, ring, scaling, decode, devices, million, got '{part}'\n")


@pytest.mark.slow
def test_every_part_runs(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--cpu", "--shrink", "32", "--out", str(tmp_path)]
    command += ["--parts", "compare,ring,scaling,decode,devices,million"]
    subprocess.run(command, check=True, timeout=1800)
    facts, tables = report.read(tmp_path / "results.json")
    names = {table.name for table in tables}
    assert names >= {"compare", "lengths", "rings", "ring-memory", "compiling", "precision", "cache", "budget"}
    assert names >= {"decode", "devices", "million", "branches"}
    assert facts["versions"]["jax"]
    assert all(table.rows and table.run.endswith("no measurement") for table in tables)


def test_the_readme_says_what_was_measured():
    """Every figure of its measured part is that of the stored report."""
    root = BENCHMARKS.parent
    facts, tables = report.read(root / "docs" / "benchmarks.json")
    readme = (root / "README.md").read_text()
    assert summary.replaced(readme, summary.summary(facts, tables)) == readme
    text = (root / "docs" / "benchmarks.md").read_text()
    for table in tables:
        assert report.markdown(table) in text
    assert not any("no measurement" in table.run for table in tables)


@pytest.mark.slow
def test_devices_at_hand_are_used_by_one_process_in_half_precision():
    """As on accelerators, where a second process would not get the devices."""
    import devices

    bench = harness.Bench(on_cpu=True, shrink=32)
    worker = workers.Worker("jax_worker.py", devices=4)
    bench.is_cpu, bench.devices, bench.torch_python = False, worker.ask("info"), sys.executable
    bench._workers = {("devices",): worker}
    assert bench.jax(1) is bench.jax(4, is_peer=True) is worker
    contenders = {
        "one": harness.Contender("one device"),
        "ring": harness.Contender("ring", devices=4),
        "too many": harness.Contender("ring", devices=8),
        "torch": harness.Contender("longnet", "torch"),
    }
    results = bench.race(workloads.LONGEST, True, contenders)
    assert set(results) == {"one", "ring"}
    assert 1e-4 < results["ring"].facts["error"] < 4e-2
    (table,) = devices.tables(bench)
    assert {row["devices"] for row in table.rows} == {1, 4}
    assert "bfloat16" in table.about
    for row in (row for row in table.rows if row["devices"] == 4):
        assert row["hop GB/s"] > 0
        assert row["messages hidden"] == "below the noise" or 0 <= row["messages hidden"] <= 1
    bench.close()
