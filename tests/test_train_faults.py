"""Training as a user starts it, while things go wrong: long cases, run by `make test-slow`. See also `soak.py`."""

import errno
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TINY = "--layers 1 --features 16 --heads 2 --segments 16 --rates 1 --seq-len 32 --batch 4 --log-every 1 --save-every 1"
TINY += " --eval-every 0 --sample-bytes 0 --warmup 1"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in ("cases.py", "smoke.py", "conftest.py"):
        shutil.copy(pathlib.Path(__file__).with_name(name), folder)
    return folder


def start(texts, out, *options, code="", environment=None):
    """Starts the training script, with other code before it if there is some."""
    patched = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import train_lm\n{code}\nsys.exit(train_lm.main())"
    given = [*TINY.split(), "--data-path", str(texts), "--out", str(out), *map(str, options)]
    quick = {"JAX_COMPILATION_CACHE_DIR": str(texts.with_name("cache")), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", patched, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | quick | (environment or {}),
    )


def ended(process):
    output, errors = process.communicate(timeout=900)
    return process.returncode, output, errors


def losses(out):
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def steps(out):
    return sorted(int(x.name) for x in (out / "checkpoints").iterdir())


def test_a_loss_that_is_not_finite_ends_the_run_and_costs_no_checkpoint(texts, tmp_path):
    """The checkpoint that is being written when the error comes is waited for, and none holds NaN."""
    out = tmp_path / "run"
    code, _, errors = ended(start(texts, out, "--devices", 1, "--learning-rate", 1e30, "--steps", 9, "--keep", 9))
    assert code == 1
    assert len(errors.splitlines()) == 1
    last = max(losses(out))
    assert f"of step {last + 1} " in errors
    assert steps(out) == list(range(1, last + 1))


# a step that fails while the checkpoint before it is still being written, which takes long
FAILING_STEP = """
import time
from lm import checkpoints
real = train_lm.Display.advance
def advance(self, step):
    real(self, step)
    if step == 3:
        raise {error}
train_lm.Display.advance = advance
slow = checkpoints.ocp.CheckpointManager._finalize
def finalize(self, *args, **options):
    time.sleep(2)
    return slow(self, *args, **options)
checkpoints.ocp.CheckpointManager._finalize = finalize
"""


@pytest.mark.parametrize("error", ["RunError('no more')", "OSError(28, 'No space left on device')"])
def test_an_error_costs_no_checkpoint(texts, tmp_path, error):
    code = FAILING_STEP.format(error=error.replace("RunError", "train_lm.RunError"))
    code, _, errors = ended(start(texts, tmp_path / "run", "--devices", 1, "--steps", 9, code=code))
    assert code == 1
    assert error.split("'")[1] in errors.splitlines()[-1]
    assert steps(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_process_cannot_read_stops_all_and_stays(texts, tmp_path, rank):
    out = tmp_path / "run"
    assert ended(start(texts, out, "--devices", 1, "--steps", 2))[0] == 0
    patch = f"""
from lm.checkpoints import Checkpoints
real = Checkpoints._read
def read(self, step, **items):
    found = real(self, step, **items)
    if "state" in items:
        raise OSError({errno.EIO}, "Input/output error")
    return found
Checkpoints._read = read
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    both = [
        start(
            *(texts, out, "--devices", 1, "--resume", "--steps", 4, "--coordinator", address),
            *("--num-processes", 2, "--process-id", i),
            code=patch if i == rank else "",
        )
        for i in range(2)
    ]
    results = [ended(process) for process in both]
    for i, (code, _, errors) in enumerate(results):
        reason = "input/output error" if i == rank else "another process could not read its part"
        assert code == 1, errors
        assert f"cannot be read: {reason}; it is kept: --resume tries again" in errors
    assert steps(out) == [1, 2]


def test_a_locale_without_unicode_is_no_error(texts, tmp_path):
    ascii_only = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    options = ["--devices", 1, "--steps", 2, "--prompt", "ü", "--sample-bytes", 40]
    code, output, errors = ended(start(texts, tmp_path / "run", *options, environment=ascii_only))
    assert (code, errors) == (0, "")
    sample = (tmp_path / "run" / "sample.txt").read_bytes()
    assert sample.startswith("ü".encode())
    assert sample.decode()
    assert output.isascii()


def test_faults_of_all_kinds_change_no_loss():
    """A short form of `make soak`."""
    options = ["--minutes", "15", "--most", "12", "--seed", str(os.getpid())]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "soak.py"), *options], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    table = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(table["kills"]) + int(table["other faults"]) >= 12
    assert table["violations"] == "0"
