"""Tests of the benchmark harness: cases, workers and report."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import subprocess
import sys

import cases
import jax
import numpy as np
import pytest
import torchscale_reference

ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"

import harness  # noqa: E402
import report  # noqa: E402
import slide  # noqa: E402
import summary  # noqa: E402
import workers  # noqa: E402
import workloads  # noqa: E402


def tiny(case: workloads.Case, length: int = 256) -> cases.Case:
    """Converts a benchmark case, scaled down to `length` tokens, to a test case."""
    small = case.scaled_down(case.length // length)
    return cases.Case(
        length=small.length,
        batch=small.batch,
        kv_heads=small.heads,
        segment_lengths=small.segment_lengths,
        dilation_rates=small.dilation_rates,
        rule="split" if small.split_heads else "mod",
        is_causal=small.causal,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", workloads.NAMED)
def test_benchmark_case_matches_the_oracle(name):
    for dtype in ("float64", "float32"):
        cases.assert_equals_oracle(tiny(workloads.NAMED[name], length=128), dtype)


@pytest.mark.parametrize("name", workloads.NAMED)
def test_flops_count_attended_pairs(name):
    case = workloads.NAMED[name]
    counts = cases.count_matrix(tiny(case))
    pairs = float(counts.sum())
    assert case.scaled_down(case.length // 256).flops(False) == pytest.approx(4 * case.dim * pairs, rel=1e-12)
    assert case.flops(True) == pytest.approx(3.5 * case.flops(False))


def test_scaling_cases_have_constant_work_per_token():
    short, long = (workloads.fixed_segments(length, causal=False) for length in (8192, 2**20))
    assert long.flops(True) / long.length == pytest.approx(short.flops(True) / short.length)
    short, long = (workloads.growing_segments(length, causal=False) for length in (16384, 2**20))
    assert long.flops(True) / long.length == pytest.approx(short.flops(True) / short.length, rel=0.02)


def test_rotate_moves_another_name_to_the_front():
    assert [harness.rotate("abc", i) for i in (0, 2, 3)] == [["a", "b", "c"], ["c", "a", "b"], ["a", "b", "c"]]


def test_exponent_is_the_slope_of_the_power_law():
    assert harness.exponent([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx(1)
    assert harness.exponent([1, 2, 4], [1, 4, 16]) == pytest.approx(2)


def test_geometric_mean_ignores_nan():
    assert harness.geometric_mean([0.5, 2.0, math.nan]) == pytest.approx(1)


@pytest.fixture(scope="module")
def bench():
    bench = harness.Bench(on_cpu=True, shrink=32, memory_limit=3 * 2**30)
    yield bench
    bench.close()


@pytest.mark.slow
def test_measure_checks_outputs_and_measures_time_and_memory(bench):
    candidates = {
        "one": harness.Candidate("one device"),
        "ring": harness.Candidate("ring", devices=2),
        "dense": harness.Candidate("dense", is_same=False),
    }
    results = bench.measure(workloads.LENGTH_SWEEP, False, candidates, memory=True)
    for result in results.values():
        assert not result.failure
        assert len(result.times) == bench.repeats
        assert min(result.times) <= result.median <= max(result.times)
        assert result.peak_bytes >= 3 * 128 * 8 * 64 * 4  # q, k and v
    assert 0 < results["ring"].info["error"] < 2e-5
    assert "error" not in results["dense"].info
    wrong = {**candidates, "dense": harness.Candidate("dense")}
    with pytest.raises(SystemExit, match=r"dense differs by .*not the same computation"):
        bench.measure(workloads.LENGTH_SWEEP, False, wrong)


@pytest.mark.slow
def test_baseline_out_of_memory_is_recorded_and_later_measurements_succeed(bench):
    too_long = workloads.dense(bench.shrink * 65536)
    big = harness.Candidate("dense", is_baseline=True, is_same=False)
    results = bench.measure(too_long, False, {"big": big})
    assert results["big"].failure == "out of memory"
    assert math.isnan(results["big"].median)
    after = bench.measure(workloads.LENGTH_SWEEP, False, {"one": harness.Candidate("one device"), "big": big})
    assert not any(result.failure for result in after.values())


@pytest.mark.slow
def test_slide_worker_measures_the_slide_encoder(tmp_path):
    worker = workers.Worker("slide_jax_worker.py")
    try:
        worker.request("load", slide=dataclasses.asdict(slide.TINY), dtype="float32")
        measured = worker.request("memory", path=str(tmp_path / "embedding.npy"))
        assert measured["bytes"] > 0 and worker.request("run")["seconds"] > 0
        assert worker.request("temporaries")["bytes"] > 0
    finally:
        worker.close()
    tiles, coordinates = slide.TINY.inputs()
    branches = (slide.TINY.segment_lengths, slide.TINY.dilation_rates)
    with jax.enable_x64(True):
        weights = {name: x.astype(np.float64) for name, x in slide.TINY.weights().items()}
        expected = torchscale_reference.gigapath(weights, tiles.astype(np.float64), coordinates, options=branches)
    assert cases.error(np.load(tmp_path / "embedding.npy"), expected) <= 2e-5


def test_unknown_action_raises_and_the_worker_survives():
    worker = workers.Worker("jax_worker.py")
    with pytest.raises(workers.WorkerError, match="KeyError"):
        worker.request("dance")
    assert worker.request("info")["platform"] == "cpu"
    worker.close()
    assert not worker.is_alive


def test_report_formats_cells_and_draws_plots(tmp_path):
    rows = [
        {"tokens": 4096, "a (s)": 0.5, "speedup vs PyTorch": 0.93, "memory reduction vs PyTorch": 1.5},
        {"tokens": 8192, "a (s)": 1234.5, "speedup vs PyTorch": 1.25, "memory reduction vs PyTorch": math.nan},
        {"tokens": "mean", "a (s)": "out of memory"},
    ]
    plot = harness.Plot("tokens", ["a (s)"], "seconds")
    table = harness.Table("some", "Some figures", "Some notes.", rows, plot, run="today")
    metadata = {
        "date": "today",
        "minutes": 3.2,
        "command": "make bench",
        "devices": "CPU devices",
        "versions": {"jax": "1"},
    }
    metadata["machine"] = {"processor": "x", "cores": 2, "memory_GiB": 3, "python": "3"}
    report.write(tmp_path / "results.json", metadata, [table])
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["tables"][0]["rows"][1]["memory reduction vs PyTorch"] is None
    text = report.write_report(tmp_path / "report.md", *report.read(tmp_path / "results.json")).read_text()
    assert "| 4,096 | 0.50 | 0.93 † | 1.50 |\n| 8,192 | 1,234 | 1.25 |  |\n| mean | out of memory |  |  |" in text
    assert "† ringjax is slower or uses more memory" in text
    assert "Measured on CPU devices with `make bench` and `make bench-full`" in text
    assert (tmp_path / "some.png").stat().st_size > 5000


def test_with_table_replaces_or_inserts():
    one, two, three = (harness.Table(name, name, "", []) for name in ("one", "two", "three"))
    assert report.with_table([one, two], three, after="one") == [one, three, two]
    assert report.with_table([one, two], three, after=None) == [one, two, three]
    again = harness.Table("one", "one again", "", [])
    assert report.with_table([one, two], again, after="two") == [again, two]


@pytest.mark.parametrize("part", ["dance", "ring:dance"])
def test_unknown_part_is_an_error(part):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--parts", f"scaling:cache,{part}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"--parts must be from compare, ring, scaling, decode, devices, million, got '{part}'\n"
    )


@pytest.mark.slow
def test_all_parts_run_end_to_end(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--cpu", "--shrink", "32", "--out", str(tmp_path)]
    command += ["--parts", "compare,ring,scaling,decode,devices,million"]
    subprocess.run(command, check=True, timeout=1800)
    metadata, tables = report.read(tmp_path / "results.json")
    names = {table.name for table in tables}
    assert names >= {"compare", "lengths", "ring-time", "ring-memory", "compile-time", "precision", "cache"}
    assert names >= {"budget", "decode", "devices", "million", "branches"}
    assert metadata["versions"]["jax"]
    assert all(table.rows and table.run.endswith("no measurement") for table in tables)


@pytest.fixture(scope="module")
def stored():
    """Metadata and tables of the published report."""
    return report.read(ROOT / "docs" / "benchmarks.json")


def test_readme_block_equals_the_stored_report(stored):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert summary.replace_block(readme, summary.readme_block(*stored)) == readme


def test_readme_block_has_at_most_20_lines_and_one_table_of_5_columns(stored):
    lines = summary.readme_block(*stored).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(lines) + 2 <= 20  # with the markers
    assert 0 < len(table) - 2 <= 8
    assert {line.count("|") for line in table} == {6}


def test_benchmarks_page_equals_the_stored_report(stored):
    metadata, tables = stored
    page = report.render(metadata, tables, images="images/bench-", summary=summary.page_summary(tables))
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page


def test_every_published_table_is_a_measurement(stored):
    _, tables = stored
    assert tables
    assert not [table.name for table in tables if "no measurement" in table.run]


FAKE_RESULTS = {
    "probes:matmul_rate": 1.0,
    "probes:sent_bytes": 1,
    "probes:compile_times": {"trace_s": 1.0, "compile_s": 1.0, "hlo_kB": 1.0},
    "probes:bfloat16_errors": {"out": 1.0, "gradients": 1.0},
    "probes:cache_times": {"cold_s": 1.0, "warm_s": 1.0, "bytes": 1},
    "probes:memory_budgets": [{"budget": 1, "where": "local", "bytes": 1}],
    "probes:utilization": {"seconds": 1.0, "utilization": 1.0, "peak": "a matrix multiply"},
    "probes:full_run": dict.fromkeys(("seconds", "compile_s", "temp_ratio", "hlo_kB", "peak_bytes", "error"), 1.0),
    "decoding:measure": [
        {"cache": "dense", "context": context, "seconds": 1.0, "bytes": 1} for context in (32_768, 1_048_576)
    ],
}


class FakeWorker:
    """Returns fixed values instead of measuring."""

    def __init__(self, *_):
        pass

    def call(self, function, **_):
        return FAKE_RESULTS[function]

    def close(self):
        pass


class FakeBench(harness.Bench):
    """A full run on CPU in which every candidate takes one second."""

    def __init__(self):
        self.quick, self.is_cpu, self.shrink, self.repeats = False, True, 1, 1
        self.peer_folder, self.memory_limit = "peer", 12 * 2**30

    def log(self, text):
        pass

    def jax(self, *_, **__):
        return FakeWorker()

    def measure(self, case, grad, candidates, memory=False):
        info = {"device_bytes": 1, "compile_s": 1.0}
        return {name: harness.Result([1.0, 1.0], 1, info) for name in candidates}


@pytest.mark.parametrize("part", ["compare", "ring", "scaling", "decode", "devices", "million"])
def test_tables_have_the_titles_notes_and_columns_of_the_stored_report(part, stored, monkeypatch):
    published = {table.name: table for table in stored[1]}
    spec = importlib.util.spec_from_file_location(f"benchmark_{part}", BENCHMARKS / f"{part}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # by path, because examples/ has a `ring.py` too
    monkeypatch.setattr(module, "Worker", FakeWorker, raising=False)
    tables = list(module.tables(FakeBench()))
    assert tables
    for table in tables:
        expected = published[table.name]
        assert (table.title, table.notes, table.columns) == (expected.title, expected.notes, expected.columns)


@pytest.mark.slow
def test_accelerators_are_used_by_one_process_in_bfloat16():
    """Only one process can use a TPU."""
    import devices

    bench = harness.Bench(on_cpu=True, shrink=32)
    worker = workers.Worker("jax_worker.py", devices=4)
    bench.is_cpu, bench.devices, bench.torch_python = False, worker.request("info"), sys.executable
    bench._workers = {("devices",): worker}
    assert bench.jax(1) is bench.jax(4, is_baseline=True) is worker
    candidates = {
        "one": harness.Candidate("one device"),
        "ring": harness.Candidate("ring", devices=4),
        "too many": harness.Candidate("ring", devices=8),
        "torch": harness.Candidate("longnet", "torch"),
    }
    results = bench.measure(workloads.LENGTH_SWEEP, True, candidates)
    assert set(results) == {"one", "ring"}
    assert 1e-4 < results["ring"].info["error"] < 4e-2
    (table,) = devices.tables(bench)
    assert {row["devices"] for row in table.rows} == {1, 4}
    assert "bfloat16" in table.notes
    for row in (row for row in table.rows if row["devices"] == 4):
        assert row["hop GB/s"] > 0
        assert row["comm hidden"] == "below noise" or 0 <= row["comm hidden"] <= 1
    bench.close()
