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
from jax.sharding import PartitionSpec

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import train_lm
from lm import data, devices, signals
from lm.flags import UserError

TINY = "--layers 1 --features 32 --heads 2 --segments 16,64 --rates 1,2 --seq-len 64 --batch 4 --log-every 1".split()
TINY += (
    "--save-every 2 --eval-every 4 --eval-batches 1 --sample-bytes 0 --steps 4 --warmup 2 --devices 8 --ring 1".split()
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
    assert {x.name for x in run.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "checkpoints"}
    found = records(run)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert found[3]["loss"] < found[0]["loss"] < np.log(256) + 1
    assert 0 < found[3]["validation_loss"] < np.log(256) + 1
    assert found[1]["learning_rate"] > found[0]["learning_rate"]
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2", "4"]
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_goes_on_over_data_ring_and_tensor_until_asked_to_stop(run, texts, tmp_path, monkeypatch, capsys):
    """From a checkpoint of one device, over 8 of them in two micro-batches: the losses of the run that was not stopped."""
    out, before = continued(run, tmp_path, up_to=2), losses(run)
    options = "--data 2 --ring 2 --tensor 2 --accumulate 2 --resume".split()
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
    assert "asked to stop: step 3 is saved; --resume goes on from it" in capsys.readouterr().out


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
    ("options", "message"),
    [
        ("--data 3 --ring 4", "a mesh of data 3 x ring 4 x tensor 1 takes 12 devices, and there are 8"),
        ("--data 0", "--data must be at least 1, got 0"),
        ("--ring 8 --seq-len 72", "--seq-len must be a multiple of 16 for layout zigzag on a ring of 8, got 72"),
        ("--data 8", "--batch must be a multiple of --accumulate x --data, 1 x 8, got 4"),
        ("--accumulate 3 --ring 1", "--batch must be a multiple of --accumulate x --data, 3 x 1, got 4"),
        ("--tensor 4 --ring 2", "key/value heads must divide evenly over `head_axis`, got 2 heads over 4 devices."),
        ("--heads 3 --ring 1", "`features` must be a multiple of `num_heads`"),
        ("--rates 1,2,3", "got 2 and 3"),
        ("--dtype float33", "float33"),
        ("--layout spiral", "`layout` must be one of ('contiguous', 'zigzag'), got 'spiral'."),
        ("--steps many", "argument --steps: invalid int value: 'many' (--help lists the options)"),
        ("--colour red", "unrecognized arguments: --colour red (--help lists the options)"),
        ("--data-path nowhere --ring 1", "--data-path nowhere: there is no such file"),
        ("--data-path {empty} --ring 1", "no bytes at all"),
        ("--data-path {dangling} --ring 1", "cannot be read: No such file or directory"),
        ("--overwrite --resume --ring 1", "--overwrite and --resume exclude each other"),
        ("--out {empty}/file/run --ring 1", "Not a directory"),
        ("--coordinator localhost:1", "--coordinator needs --num-processes and --process-id below it, got 1 and -1"),
        ("--rehearse v9:2x2", "`topology` must be one of"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path, capsys, texts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    named = options.format(empty=tmp_path / "empty", dangling=tmp_path / "dangling").split()
    given = ["--out", str(tmp_path / "out"), "--data-path", texts, *named]
    assert train_lm.main([*TINY, *given]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_another_model_and_another_run_are_one_line(run, texts, capsys):
    given = [*TINY, "--data-path", texts, "--out", str(run)]
    assert train_lm.main([*given, "--resume", "--features", "64", "--rates", "1,4"]) == 2
    line = one_line(capsys)
    assert line.startswith("--resume: the checkpoint is of another model: features 32 instead of 64, pattern ")
    assert train_lm.main(given) == 2
    assert one_line(capsys).startswith(f"{run} holds an earlier run: --resume goes on with it")
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2", "4"]
