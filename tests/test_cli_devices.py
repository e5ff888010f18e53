"""`ringjax doctor`, `tune` and `aot` on the available devices."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import QUICK, ring_mesh
from processes import run_processes

import ringjax as rj
from ringjax._src.aot.collectives import executed
from ringjax._src.aot.compile import CompiledProgram, lowered
from ringjax._src.aot.targets import target_named
from ringjax.cli import aot as cli_aot
from ringjax.cli import running
from ringjax.cli.aot import report_in_subprocess
from ringjax.cli.arguments import PlanOptions
from ringjax.cli.main import main
from ringjax.cli.tune import Trial, Tuning, load, tune

JOB = PlanOptions(
    256, num_heads=4, head_dim=8, pattern_text="16/1,T/8", is_causal=True, layout="zigzag", dtype="float32"
)


@pytest.mark.slow
def test_doctor_reports_devices_and_passes_its_checks():
    command = [sys.executable, "-m", "ringjax", "doctor", "--cpu-devices", "2", "--seconds", "0", "--json"]
    sooner = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # a third of the compile time
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=sooner)
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)
    assert output["is_well"] is True
    assert (output["devices"]["number"], output["devices"]["platform"], output["devices"]["processes"]) == (2, "cpu", 1)
    assert output["versions"]["jax"] == __import__("importlib.metadata").metadata.version("jax")
    assert [check["passed"] for check in output["checks"]] == [True, True]
    assert all(0 < check["error"] < 2e-5 for check in output["checks"])
    assert output["measurement"] is None


def test_doctor_reports_failed_checks(monkeypatch, capsys):
    errors = iter([1e-7, float("nan")])
    monkeypatch.setattr("ringjax.cli.doctor.error_against_reference", lambda *_, **__: next(errors))
    assert main(["doctor", "--seconds", "0"]) == 1
    one, ring = (line for line in capsys.readouterr().out.splitlines() if line.startswith("check"))
    assert one == "check      128 tokens on one device, forward and gradient: passed (error 1.0e-07, limit 2e-05)"
    assert "1024 tokens on a ring of 8 devices, zigzag, forward and gradient: FAILED" in ring


@pytest.mark.slow
def test_doctor_detects_wrong_results(monkeypatch, capsys):
    right = running.dilated_attention
    monkeypatch.setattr(running, "dilated_attention", lambda *x, **options: 1.001 * right(*x, **options))
    monkeypatch.setattr("ringjax.cli.doctor.jax.device_count", lambda: 1)
    assert main(["doctor", "--seconds", "0"]) == 1
    output = capsys.readouterr().out
    assert "128 tokens on one device, forward and gradient: FAILED" in output
    assert "Some checks FAILED" in output


@pytest.mark.slow
def test_doctor_covers_all_processes():
    code = "from processes import initialize_from_environment as join; join(); "
    code += "from ringjax.cli.main import main; raise SystemExit(main(['doctor', '--seconds', '1', '--json']))"
    first, second = run_processes([sys.executable, "-c", code], 2, devices_per_process=2, timeout=500)
    output = json.loads(first.output[first.output.index("{") :])
    assert (output["is_well"], output["devices"]["number"], output["devices"]["processes"]) == (True, 4, 2)
    assert output["measurement"]["hop_bytes_per_second"] > 0
    assert "is_well" not in second.output  # only process 0 prints


@pytest.mark.slow
def test_processes_with_different_clocks_measure_the_same_number_of_times():
    code = "from processes import initialize_from_environment as join; join(); "
    code += "import time, jax; from ringjax.cli import running; clock, speed = time.perf_counter, jax.process_index(); "
    code += "time.perf_counter = lambda: clock() * (1 + 20 * speed); "
    code += "assert running.hop_bandwidth(running.ring_mesh(), 4096, budget=0.5) > 0"
    run_processes([sys.executable, "-c", code], 2, timeout=60)


def test_first_process_decides_how_often_all_measure(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.experimental.multihost_utils.broadcast_one_to_all", lambda count: np.int32(5))
    calls = []
    running.median_seconds(calls.append, 1, budget=0)
    assert len(calls) == 2 + 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 8])
def test_doctor_measures_speed(number):
    command = [sys.executable, "-m", "ringjax", "doctor", "--cpu-devices", str(number), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    output = json.loads(done.stdout)
    assert output["is_well"]
    assert output["measurement"]["training_tokens_per_second"] > 0
    assert (output["measurement"]["hop_bytes_per_second"] is None) == (number == 1)


def test_hop_bandwidth_is_measured():
    assert running.hop_bandwidth(ring_mesh(2), 4096, budget=0, hops=2) > 0


def test_missing_compiler_error_names_the_extra_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for target, extra in (("tpu:v5p:2x2x2", "aot-tpu"), ("cuda:h100:1x1x8", "aot-cuda")):
        assert main(["aot", "--target", target]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"pip install '.[{extra}]' in a clone of ringjax" in line


@pytest.fixture
def on_cpu(monkeypatch):
    """Compiles for CPU devices in this process instead of for a TPU."""

    def compile_here(target, spec, is_gradient, dump_to=None, has_segment_ids=False):
        program = lowered(ring_mesh(target.devices), spec, is_gradient, has_segment_ids)
        return CompiledProgram(program.compile(compiler_options=QUICK), 1.0)

    monkeypatch.setattr(cli_aot, "compile_for", compile_here)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def in_process(command, *, input, **_):
        asked = json.loads(input)
        found = cli_aot.report_program(PlanOptions(**asked["job"]), target_named(asked["target"]), asked["part"])
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(vars(found)), stderr="")

    monkeypatch.setattr(cli_aot.subprocess, "run", in_process)


def test_aot_compiles_sinks_with_the_collectives_of_the_plan(on_cpu, capsys):
    words = ["aot", "--target", "tpu:v5e:2x2", "--seq-len", "256", "--heads", "4", "--head-dim", "8"]
    words += ["--pattern", "T/8", "--dtype", "f32", "--strategy", "all_to_all", "--pass", "gradient"]
    found = []
    for options in ([], ["--sinks"]):
        assert main([*words, *options, "--json"]) == 0
        found += json.loads(capsys.readouterr().out)["programs"]
    assert [x["collectives"] == x["planned_collectives"] for x in found] == [True, True]
    assert found[1]["collectives"] == found[0]["collectives"] + 1  # sums the gradients of the sinks


def test_aot_report_is_compared_with_the_plan(on_cpu, capsys):
    words = ["aot", "--target", "tpu:v5e:2x2", "--seq-len", "256", "--heads", "4", "--head-dim", "8", "--causal"]
    words += ["--pattern", "16/1,T/8", "--dtype", "f32", "--strategy", "ring", "--pass", "forward"]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["programs"]
    assert found["devices"] == 4
    assert found["collectives"] == found["planned_collectives"] == 3
    assert found["operand_bytes"] == found["planned_operand_bytes"] == 3 * 2 * (256 // 4 // 8) * 4 * 8 * 4
    assert found["argument_bytes"] == 3 * 256 // 4 * 4 * 8 * 4
    assert found["fits"] is True
    fields = {field.name for field in dataclasses.fields(cli_aot.ProgramReport)}
    text = str(cli_aot.ProgramReport(**{name: value for name, value in found.items() if name in fields}))
    assert text.count("exact") == 2
    assert "The program fits in the 16.0 GiB of a device." in text


def test_compiler_error_is_reported(on_cpu, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED:\n needs 168 GB of 95 GB")

    monkeypatch.setattr(cli_aot, "compile_for", refuse)
    assert main(["aot", "--target", "tpu:v5p:2x2x1"]) == 1
    assert "compilation failed: RESOURCE_EXHAUSTED: needs 168 GB of 95 GB" in capsys.readouterr().out
    assert report_in_subprocess(JOB, "tpu:v5p:2x2x1", "gradient").fits is False


def test_compiler_crash_is_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    dead = subprocess.CompletedProcess([], 139, stdout="", stderr="Segmentation fault\n")
    monkeypatch.setattr(cli_aot.subprocess, "run", lambda *_, **__: dead)
    found = report_in_subprocess(JOB, "cuda:h100:1x1x2", "gradient")
    assert (found.error, found.fits, found.planned_collectives > 0) == ("Segmentation fault", False, True)


LOOP = """HloModule jit_f, is_scheduled=true

%body (x: (s32[], bf16[2,8], f32[4])) -> (s32[], bf16[2,8], f32[4]) {
  %x = (s32[], bf16[2,8]{1,0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %a = bf16[2,8]{1,0} get-tuple-element(%x), index=1
  %b = f32[4]{0} get-tuple-element(%x), index=2
  %start = ((bf16[2,8]{1,0}, f32[4]{0}), (bf16[2,8]{1,0}, f32[4]{0})) collective-permute-start(%a, %b), channel_id=1
  %done = (bf16[2,8]{1,0}, f32[4]{0}) collective-permute-done(%start)
  ROOT %t = (s32[], bf16[2,8]{1,0}, f32[4]{0}) tuple(%i, %a, %b)
}

%condition (y: (s32[], bf16[2,8], f32[4])) -> pred[] {
  %y = (s32[], bf16[2,8]{1,0}, f32[4]{0}) parameter(0)
  %n = s32[]{:T(128)} constant(6), metadata={op_name="f"}
  %j = s32[] get-tuple-element(%y), index=0
  ROOT %less = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (p: bf16[2,8]) -> bf16[2,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %g = bf16[16,8]{1,0} all-gather(%p), dimensions={0}
  %w = (s32[], bf16[2,8]{1,0}, f32[4]{0}) tuple(%p)
  %loop = (s32[], bf16[2,8]{1,0}, f32[4]{0}) while(%w), condition=%condition, body=%body
  ROOT %r = bf16[2,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_loop_iterations_come_from_the_trip_count_or_the_loop_bound():
    by_bound = {("collective-permute", "bfloat16", 32): 6, ("collective-permute", "float32", 16): 6}
    gathered = {("all-gather", "bfloat16", 32): 1}
    assert executed(LOOP) == {**by_bound, **gathered}
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert executed(noted) == {**{key: 3 for key in by_bound}, **gathered}
    with pytest.raises(ValueError, match="trip count of every loop with collectives, got 'loop'"):
        executed(LOOP.replace("direction=LT", "direction=NE"))


WORDS = ["--seq-len", "64", "--heads", "2", "--head-dim", "8", "--pattern", "8/1,T/2", "--dtype", "f32"]


@pytest.mark.slow
def test_tune_measures_every_trial(tmp_path):
    path = tmp_path / "tuning.json"
    assert main(["tune", *WORDS, "--ring", "2", "--seconds", "0", "-o", str(path)]) == 0
    assert all(trial.seconds > 0 for trial in load(path).trials)


def test_fastest_layout_and_strategy_are_saved_and_loaded(tmp_path, monkeypatch, capsys):
    times = {("contiguous", 2): 3.0, ("zigzag", 2): 1.0}

    def measured(program, *arrays, budget):
        ring = program.__wrapped__.__closure__[0].cell_contents.keywords["ring"]
        return times[ring.layout, ring.size("axis_name")] + (0.5 if ring.strategy == "auto" else 0)

    monkeypatch.setattr("ringjax.cli.tune.median_seconds", measured)
    path = tmp_path / "tuning.json"
    assert main(["tune", *WORDS, "--ring", "2", "--seconds", "0", "-o", str(path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    tuning = load(path)
    assert (output["file"], output["layout"], tuning.layout, tuning.ring_size) == (str(path), "zigzag", "zigzag", 2)
    assert isinstance(hash(tuning), int)
    assert {(t.layout, t.seconds) for t in tuning.trials} >= {("contiguous", 3.5), ("zigzag", 1.5)}
    assert tuning.block_sizes is None
    ring = tuning.ring(ring_mesh(2))
    assert (ring.layout, ring.strategy) == ("zigzag", tuning.strategy)
    assert "not measured (no Pallas kernels on this platform)" in str(tuning)


def test_fastest_block_sizes_are_selected(monkeypatch):
    def measured(program, *arrays, budget):
        inner = program.__wrapped__
        attention = inner if hasattr(inner, "keywords") else inner.__closure__[0].cell_contents
        sizes = attention.keywords["block_sizes"]
        if sizes is not None and sizes.key == 64:
            raise RuntimeError("does not fit")
        if len(arrays) == 3:
            return 9.0 if sizes is None else 1000 / sizes.query
        return 999.0 if sizes is None else float(sizes.query + sizes.grad_query)

    monkeypatch.setattr("ringjax.cli.tune.median_seconds", measured)
    job = PlanOptions(64, num_heads=1, head_dim=16, pattern_text="32/1", dtype="float32")
    tuning = tune(job, 0, implementation="interpret_gpu", sizes=((16, 16), (128, 32), (32, 64)))
    assert tuning.block_sizes == rj.BlockSizes(128, 32, 16, 16)  # forward and backward are tuned independently
    assert [t.error for t in tuning.trials if t.seconds is None] == ["does not fit"]
    assert "128 x 32" in str(tuning)


@pytest.mark.slow
def test_block_sizes_of_kernels_are_measured():
    job = PlanOptions(64, num_heads=1, head_dim=16, pattern_text="32/1", dtype="float32")
    tuning = tune(job, 0, implementation="interpret_gpu", sizes=((16, 16), (32, 16)))
    tried = [t.block_sizes for t in tuning.trials if t.block_sizes]
    assert {(s.grad_query, s.grad_key) for s in tried} == {(16, 16), (32, 16)}
    assert all(t.seconds for t in tuning.trials)
    q = np.ones((1, 64, 1, 16), np.float32)
    sizes = tuning.block_sizes or rj.BlockSizes(16, 16)
    out = rj.dilated_attention(q, q, q, job.pattern, implementation="interpret_gpu", block_sizes=sizes)
    assert np.asarray(out) == pytest.approx(np.ones_like(q), abs=1e-6)


def test_tuning_round_trips_through_a_file(tmp_path):
    sizes = rj.BlockSizes(128, 64)
    tuning = Tuning("TPU", 8, "zigzag", "ring", sizes, "x", (Trial("zigzag", "ring", sizes, True, None, "no"),))
    tuning.save(tmp_path / "t.json")
    assert load(tmp_path / "t.json") == tuning
    (tmp_path / "t.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="`path` must be a file written by this version of `ringjax tune`"):
        load(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")


def test_arrays_are_sharded_in_the_layout_of_the_ring():
    ring = rj.Ring(ring_mesh(4), layout="zigzag")
    (query, *_) = running.random_arrays(16, 2, 8)
    stored = running.on_devices(query, np.float32, ring)
    assert (np.asarray(rj.from_layout(np.asarray(stored), "zigzag", 4)) == query).all()
    assert stored.sharding.is_equivalent_to(jax.NamedSharding(ring.mesh, ring.spec()), 4)
