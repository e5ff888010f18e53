"""`examples/train_lm.py`: the same losses on every mesh, interrupted or not, and mistakes as one line."""

import argparse
import ast
import bisect
import heapq
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from jax.sharding import PartitionSpec
from lm import devices
from lm.display import device_bytes


def words(text):
    return text.split()


TINY = words("--layers 1 --features 32 --heads 2 --segments 16,64 --rates 1,2 --seq-len 64 --batch 4 --log-every 1")
TINY += words(
    "--save-every 2 --eval-every 4 --eval-batches 1 --sample-bytes 0 --steps 4 --warmup 2 --devices 8 --ring 1"
)


@pytest.fixture(scope="module")
def quick():
    """Compiles with few optimizations, which takes a fraction of the time; optax promotes dtypes."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for module in (argparse, ast, bisect, heapq):
        shutil.copy(module.__file__, folder)
    return str(folder)


def records(folder):
    return [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {record["step"]: record["loss"] for record in records(folder)}


@pytest.fixture(scope="module")
def run(quick, texts, tmp_path_factory):
    """A run of 4 steps on one device."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert train_lm.main([*TINY, "--data-path", texts, "--out", str(out)]) == 0
    return out


def continued(run, tmp_path, up_to):
    """A copy of the run as it was at a checkpoint."""
    shutil.copytree(run, tmp_path / "copy")
    for step in (2, 4):
        if step > up_to:
            shutil.rmtree(tmp_path / "copy" / "checkpoints" / str(step))
    return tmp_path / "copy"


def one_line(capsys):
    """The only line on stderr, without the name of the program."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_lm: ")
    return line.removeprefix("train_lm: ")


def test_a_run_leaves_everything(run):
    assert {x.name for x in run.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "checkpoints", "lock"}
    found = records(run)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert found[3]["loss"] < found[0]["loss"] < np.log(256) + 1
    assert 0 < found[3]["validation_loss"] < np.log(256) + 1
    assert found[1]["learning_rate"] > found[0]["learning_rate"]
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2", "4"]
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_goes_on_over_data_ring_and_tensor_until_asked_to_stop(run, texts, tmp_path, monkeypatch, capsys):
    """From a checkpoint of one device, over 8 of them in two micro-batches: the losses of the run before."""
    out, before = continued(run, tmp_path, up_to=2), losses(run)
    options = words("--data 2 --ring 2 --tensor 2 --accumulate 2 --resume")
    plain = train_lm.Display.advance

    def advance(self, step):
        plain(self, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train_lm.Display, "advance", advance)
    handler = signal.getsignal(signal.SIGTERM)
    assert train_lm.main([*TINY, *options, "--data-path", texts, "--out", str(out)]) == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert losses(out) == pytest.approx({step: before[step] for step in (1, 2, 3)}, rel=1e-4)
    assert records(out)[2]["seconds_per_step"] != records(run)[2]["seconds_per_step"]  # computed again
    assert sorted(x.name for x in (out / "checkpoints").iterdir()) == ["2", "3"]
    assert "stopped on request: step 3 is saved; continue with --resume" in capsys.readouterr().out


def test_parameters_and_moments_are_sharded_and_drawn_alike(quick):
    config = train_lm.parse(train_lm.Config, "", [*TINY, "--data", "2", "--ring", "2", "--tensor", "2"])
    training = train_lm.Training(config, devices.make_mesh(jax.devices(), 2, 2, 2))
    shardings, moments = training.shardings.parameters, training.shardings.optimizer[1][0].mu
    block = shardings["blocks"]
    assert block["expand"]["kernel"].spec == PartitionSpec(None, "data", "tensor")
    assert block["contract"]["kernel"].spec == PartitionSpec(None, "tensor", "data")
    assert block["attention"]["query"]["kernel"].spec == PartitionSpec(None, "data", "tensor", None)
    assert shardings["embed"]["embedding"].spec == PartitionSpec("data", None)
    assert moments == shardings
    state = training.init()
    one = train_lm.Training(config, devices.make_mesh(jax.devices(), 1, 1, 1)).init()
    for (path, x), y in zip(jax.tree.leaves_with_path(state.parameters), jax.tree.leaves(one.parameters), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-7, err_msg=str(path))
        assert x.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--heads 8 --ring 8 --seq-len 2048 --segments 128,2048", "contiguous"),  # devices exchange heads
        ("--heads 2 --ring 8", "zigzag"),  # too few heads: keys rotate
        ("--heads 2 --ring 8 --layout contiguous", "contiguous"),
        ("--ring 1", "contiguous"),
    ],
)
def test_layout_is_zigzag_only_if_keys_rotate(options, layout):
    config = train_lm.parse(train_lm.Config, "", [*TINY, *words(options)])
    training = train_lm.Training(config, devices.make_mesh(jax.devices(), config.data, config.ring, config.tensor))
    assert training.ring.layout == training.plan.spec.layout == layout
    assert training.plan.spec.device == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data 3 --ring 4", "a mesh of data 3 x ring 4 x tensor 1 needs 12 devices, but only 8 are available"),
        ("--data 0", "--data must be at least 1, got 0"),
        ("--keep 0", "--keep must be at least 1, got 0"),
        ("--log-every 0", "--log-every must be at least 1, got 0"),
        ("--ring 8 --seq-len 72", "--seq-len must be a multiple of 16 for layout zigzag on a ring of 8, got 72"),
        ("--data 8", "--batch must be a multiple of --accumulate x --data, 1 x 8, got 4"),
        ("--accumulate 3 --ring 1", "--batch must be a multiple of --accumulate x --data, 3 x 1, got 4"),
        ("--tensor 4 --ring 2", "devices of `head_axis`, got 2 heads over 4 devices."),
        ("--heads 3 --ring 1", "`features` must be a multiple of `num_heads`"),
        ("--rates 1,2,3", "got 2 and 3"),
        ("--dtype float33", "float33"),
        (
            "--strategy none",
            "`strategy` must be one of ('auto', 'ring', 'all_gather', 'all_to_all', 'all_to_all_ring')",
        ),
        ("--layout spiral", "`layout` must be one of ('contiguous', 'zigzag'), got 'spiral'."),
        ("--steps many", "argument --steps: invalid int value: 'many' (see --help)"),
        ("--colour red", "unrecognized arguments: --colour red (see --help)"),
        ("--data-path nowhere --ring 1", "--data-path nowhere: no such file or folder"),
        ("--data-path {empty} --ring 1", "no bytes to train on"),
        ("--data-path {dangling} --ring 1", "cannot be read: No such file or directory"),
        ("--overwrite --resume --ring 1", "--overwrite and --resume are mutually exclusive"),
        ("--out {empty}/file/run --ring 1", "Not a directory"),
        ("--out {empty}/{long} --ring 1", "File name too long"),
        ("--profile {empty}/file/x --ring 1", "/file/x cannot be written to: Not a directory"),
        (
            "--coordinator localhost:1",
            "--coordinator requires --num-processes and a --process-id below it, got 1 and -1",
        ),
        ("--aot v9:2x2", "`topology` must be one of"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path, capsys, texts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    paths = {name: tmp_path / name for name in ("empty", "dangling")}
    named = options.format(long="x" * 300, **paths).split()
    given = ["--out", str(tmp_path / "out"), "--data-path", texts, *named]
    assert train_lm.main([*TINY, *given]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_another_model_and_another_run_are_one_line(run, texts, capsys):
    """And nothing in the folder changes, not even its config."""
    given = [*TINY, "--data-path", texts, "--out", str(run)]
    files = {x: x.read_bytes() for x in run.rglob("*") if x.is_file() and x.name != "lock"}
    assert train_lm.main([*given, "--resume", "--features", "64", "--rates", "1,4"]) == 2
    line = one_line(capsys)
    assert line.startswith("--resume: the checkpoint belongs to another model: features 32 instead of 64, pattern ")
    assert train_lm.main(given) == 2
    assert one_line(capsys).startswith(f"{run} contains an earlier run: pass --resume to continue it")
    for other, name in (("--seq-len 32", "seq_len 64 instead of 32"), ("--seed 1", "seed 0 instead of 1")):
        assert train_lm.main([*given, "--resume", *words(other)]) == 2
        assert one_line(capsys) == f"--resume: the checkpoint orders the data differently: {name}"
    assert {x: x.read_bytes() for x in run.rglob("*") if x.is_file() and x.name != "lock"} == files
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2", "4"]


# ---- long runs, as a user starts them ----

LONG = words("--layers 2 --features 32 --heads 2 --segments 32,128 --rates 1,2 --seq-len 128 --batch 4 --log-every 1")
LONG += words("--save-every 10 --eval-every 0 --sample-bytes 0 --steps 30")


def command(script, *options):
    return [sys.executable, "-W", "error", str(pathlib.Path(train_lm.__file__).with_name(script)), *map(str, options)]


def trained(out, *options, processes=1):
    """Trains to the end, and returns the losses."""
    given = [*LONG, "--out", out, *options]
    if processes > 1:
        given = ["--processes", processes, "--devices", 2, "--", *given]
    done = subprocess.run(
        command("launch_local.py" if processes > 1 else "train_lm.py", *given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(out)


@pytest.fixture(scope="module")
def uninterrupted(texts, tmp_path_factory):
    """30 steps on one device."""
    return trained(tmp_path_factory.mktemp("one") / "run", "--data-path", texts, "--devices", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "processes"),
    [
        ("--devices 8 --ring 8", 1),
        ("--devices 8 --data 2 --ring 4", 1),
        ("--devices 8 --ring 2 --tensor 2", 1),
        ("--data 2 --ring 2", 2),
        ("--devices 1 --accumulate 4", 1),
    ],
)
def test_losses_are_the_same_on_every_mesh(uninterrupted, texts, tmp_path, mesh, processes):
    found = trained(tmp_path / "run", "--data-path", texts, *mesh.split(), processes=processes)
    assert list(found) == list(range(1, 31))
    assert found[30] < found[1] - 1
    assert found == pytest.approx(uninterrupted, rel=1e-4)
    worst = max(abs(found[step] / uninterrupted[step] - 1) for step in found)
    print(f"{mesh}: largest relative difference {worst:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all_to_all", "all_to_all_ring", "ring"])
def test_losses_are_the_same_with_every_strategy(texts, tmp_path, strategy):
    heads = {"all_to_all": 8, "all_to_all_ring": 4, "ring": 1}[strategy]
    given = ["--data-path", texts, "--heads", heads, "--devices"]
    one = trained(tmp_path / "one", *given, 1)
    many = trained(tmp_path / "many", *given, 8, "--ring", 8, "--strategy", strategy)
    assert many == pytest.approx(one, rel=1e-4)
    assert one[30] < one[1] - 1


def interrupted(out, at, number, *options, processes=0):
    """Starts a run, sends it a signal when it has written the record of a step, and returns how it ended."""
    given = [*LONG, "--out", out, *options]
    if processes:
        given = ["--processes", processes, "--devices", 2, "--", *given]
    script = "launch_local.py" if processes else "train_lm.py"
    process = subprocess.Popen(
        command(script, *given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 400
    metrics = pathlib.Path(out) / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < at:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


@pytest.mark.slow
def test_killed_at_a_random_step(uninterrupted, texts, tmp_path):
    at = random.Random(time.time_ns()).randrange(11, 29)
    options = ["--data-path", texts, "--devices", 1]
    code, _, _ = interrupted(tmp_path / "run", at, signal.SIGKILL, *options)
    assert code == -signal.SIGKILL
    assert trained(tmp_path / "run", *options, "--resume") == uninterrupted, f"killed after step {at}"
    print(f"killed after step {at}: the same losses")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_asked_to_stop(texts, tmp_path, processes):
    options = ["--data-path", texts, *([] if processes else ["--devices", 4])]
    whole = trained(tmp_path / "whole", *options, processes=processes or 1)
    code, output, _ = interrupted(tmp_path / "run", 7, signal.SIGTERM, *options, processes=processes)
    assert code == 143
    assert "is saved; continue with --resume" in output
    newest = max(int(x.name) for x in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == max(losses(tmp_path / "run")) < 30
    assert trained(tmp_path / "run", *options, "--resume", processes=processes or 1) == whole


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported(uninterrupted, texts, tmp_path):
    options = ["--data-path", texts, "--devices", 1]
    trained(tmp_path / "run", *options)
    newest = tmp_path / "run" / "checkpoints" / "30" / "state"
    file = max((x for x in newest.rglob("d/*") if x.is_file()), key=lambda x: x.stat().st_size)
    file.write_bytes(file.read_bytes()[:100])
    done = subprocess.run(
        command("train_lm.py", *LONG, "--out", tmp_path / "run", *options, "--resume"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the checkpoint of step 30 in " in done.stdout
    assert "resuming from the checkpoint of step 20" in done.stdout
    assert losses(tmp_path / "run") == uninterrupted
    assert not done.stderr


@pytest.mark.slow
def test_a_full_disk_is_one_line(texts, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        done = subprocess.run(
            command("train_lm.py", *LONG, "--out", disk / "run", "--data-path", texts, "--devices", 1, "--keep", 9),
            capture_output=True,
            text=True,
            check=False,
        )
        kept = sorted(x.name for x in (disk / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "could not be written" in done.stderr
    assert f"no space left on device; steps with a checkpoint: {', '.join(kept)}" in done.stderr
    assert kept


@pytest.mark.slow
def test_memory_of_a_device_falls_with_the_ring(quick):
    given = "--seq-len 32768 --batch 1 --segments 512,4096,32768 --rates 1,2,4 --ring"
    used = {}
    for size in (1, 2, 4, 8):
        config = train_lm.parse(train_lm.Config, "", [*words(given), str(size)])
        training = train_lm.Training(config, devices.make_mesh(jax.devices(), 1, size, 1))
        compiled = training.step.lower(training.wanted, training.wanted_batch).compile()
        used[size] = sum(device_bytes(compiled))
    print({size: f"{number / 2**20:.0f} MiB" for size, number in used.items()})
    assert all(used[1] / used[size] > 0.8 * size for size in used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "branch", "collective"),
    [(2, "all_to_all1_w128_r2", "all_to_all"), (1, "ring1_w128_r2", "ppermute")],
    ids=["exchanges", "hops"],
)
def test_a_profile_names_branches_and_messages(heads, branch, collective, texts, tmp_path):
    options = ["--data-path", texts, "--devices", 2, "--heads", heads, "--steps", 8]
    trained(tmp_path / "run", *options, "--profile", tmp_path / "profile")
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for name in ("local0_w32_r1/", "local0_w32_r1_bwd/", f"{branch}/{collective}", f"{branch}_bwd/{collective}"):
        assert name.encode() in content, name
