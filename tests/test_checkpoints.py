"""The checkpoints of `examples/train_lm.py`: whole or not at all, on any mesh, and none of another model."""

import errno
import json
import resource
import shutil
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lm import checkpoints as checkpoints_module
from lm.checkpoints import CheckpointError, Checkpoints, fingerprint
from lm.flags import RunError, UserError


def state(shape=(2, 4), seed=0):
    """Arrays on a mesh of this shape; the same numbers on every mesh."""
    mesh = jax.make_mesh(shape, ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    wide, narrow = jax.random.normal(jax.random.key(seed), (2, 128, 64))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    return {
        "wide": put(wide, "data", "ring"),
        "narrow": put(narrow.astype(jnp.bfloat16), "ring"),
        "count": put(jnp.int32(seed)),
        "rng": put(jax.random.key_data(jax.random.key(seed))),
    }


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def accept(facts):
    assert facts["model"] == "mine"


class Lines(list):
    def __call__(self, text):
        self.append(text)


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 2 and 3; that of step 1 was the third last."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    checkpoints = Checkpoints(folder, 2, Lines())
    for step in (1, 2, 3):
        checkpoints.save(step, state(seed=step), {"model": "mine", "rows": 10 * step})
    checkpoints.close()
    return folder


@pytest.fixture
def three(saved, tmp_path):
    """A copy of these checkpoints."""
    return shutil.copytree(saved, tmp_path / "run")


def restored(folder, lines, shape=(2, 4), check=accept):
    checkpoints = Checkpoints(folder, 2, lines)
    try:
        return checkpoints.restore(like(state(shape)), check)
    finally:
        checkpoints.close()


def files_of(folder):
    """The files with numbers in them, largest first."""
    return sorted((x for x in folder.rglob("d/*") if x.is_file()), key=lambda x: -x.stat().st_size)


def assert_is(found, seed):
    for name, x in state(seed=seed).items():
        assert np.asarray(found.state[name]).tobytes() == np.asarray(x).tobytes(), name


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 1)])
def test_newest_comes_back_on_any_mesh(three, lines, shape):
    found = restored(three, lines, shape)
    assert (found.step, found.facts["rows"]) == (3, 30)
    assert_is(found, 3)
    assert all(found.state[name].sharding == x.sharding for name, x in state(shape).items())
    assert sorted(x.name for x in three.iterdir()) == ["2", "3"]
    assert not lines


def test_there_may_be_none(tmp_path, lines):
    assert restored(tmp_path / "new", lines) is None


def test_what_was_saved_may_be_donated(tmp_path, lines):
    checkpoints = Checkpoints(tmp_path, 1, lines)
    given = state(seed=5)
    checkpoints.save(5, given, {"model": "mine"})
    where = jax.tree.map(lambda x: x.sharding, given)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0, out_shardings=where)(given)
    for x in given.values():
        x.delete()  # a donation that finds the writer still looking at an array copies it and leaves it alive
    checkpoints.close()
    assert_is(restored(tmp_path, lines), 5)


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "gone", "no facts"])
def test_damaged_newest_is_reported_and_the_one_before_used(three, lines, damage):
    data = next(x for x in files_of(three / "3" / "state"))
    content = data.read_bytes()
    if damage == "no facts":
        (three / "3" / "facts" / "metadata").write_text('{"rows": 3')
    elif damage == "gone":
        data.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
        data.write_bytes({"cut": content[:middle], "empty": b"", "changed": changed}[damage])
    found = restored(three, lines)
    assert found.step == 2
    assert_is(found, 2)
    assert len(lines) == 1
    assert lines[0].startswith(f"the checkpoint of step 3 in {three} is damaged and is not used: ")
    assert "\n" not in lines[0]
    assert sorted(x.name for x in three.iterdir()) == ["2", "damaged-3"]
    again = Checkpoints(three, 2, lines)  # its place is free
    again.save(3, state(seed=7), {"model": "mine"})
    again.close()
    assert_is(restored(three, lines), 7)


def test_other_numbers_under_the_same_names_are_noticed(three, lines, monkeypatch):
    """Whatever the files look like: bits that differ from those saved are not taken for them."""
    assert fingerprint(state((1, 8), seed=3)) == fingerprint(state((8, 1), seed=3))
    changed = state(seed=3)
    changed["wide"] = changed["wide"].at[3, 3].add(1e-6)
    assert fingerprint(changed) != fingerprint(state(seed=3))
    real = Checkpoints._read

    def read(self, step, **items):
        found = real(self, step, **items)
        if step == 3 and "state" in items:
            found.state["wide"] = changed["wide"]
        return found

    monkeypatch.setattr(Checkpoints, "_read", read)
    assert restored(three, lines).step == 2
    assert "its arrays differ from those that were saved" in lines[0]


def test_none_whole_is_an_error_not_a_new_beginning(three, lines):
    for step in ("2", "3"):
        files_of(three / step / "state")[0].write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint is intact"):
        restored(three, lines)
    assert sorted(x.name for x in three.iterdir()) == ["damaged-2", "damaged-3"]


def test_another_model_is_refused_and_stays(three, lines):
    def check(facts):
        raise UserError(f"it is of {facts['model']}")

    with pytest.raises(UserError, match="it is of mine"):
        restored(three, lines, check=check)
    assert sorted(x.name for x in three.iterdir()) == ["2", "3"]
    assert not lines


def test_killed_while_writing(three, lines):
    """What was being written when the process died is cleared away."""
    (three / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert restored(three, lines).step == 3
    assert sorted(x.name for x in three.iterdir()) == ["2", "3"]


def test_a_disk_that_takes_no_more_is_one_line_and_keeps_the_others(three, lines):
    checkpoints = Checkpoints(three, 2, lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # no file may grow beyond
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(4, state(seed=4), {"model": "mine"})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    expected = (
        f"the checkpoint of step 4 could not be written to {three}: file too large; steps with a checkpoint: 2, 3"
    )
    assert str(caught.value) == expected
    assert checkpoints.steps() == [2, 3]  # a writer that is still at work may leave something beside them
    assert restored(three, lines).step == 3


def test_folders_that_cannot_hold_them(tmp_path, lines):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot hold checkpoints: (Not a directory|File exists)"):
        Checkpoints(tmp_path / "file", 1, lines)


def failing_read(error, at=3, item="facts"):
    """A `Checkpoints._read` that raises an error for an item of a step."""
    real = Checkpoints._read

    def read(self, step, **items):
        if step == at and item in items:
            raise error
        return real(self, step, **items)

    return read


def caused(error, cause):
    error.__cause__ = cause
    return error


UNREADABLE = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    MemoryError(),
    caused(Exception("array 3"), OSError(errno.ENOMEM, "Cannot allocate memory")),
    ValueError("PERMISSION_DENIED: Error reading \"wide/0.0\": Permission denied [os_error_code='13']"),
    ValueError("UNKNOWN: Error reading \"wide/0.0\": Input/output error [os_error_code='5']"),
    caused(Exception("array 3"), ValueError("RESOURCE_EXHAUSTED: too little memory")),
    jax.errors.JaxRuntimeError("INTERNAL: something else"),
    RuntimeError("an error that nobody knows"),
]


@pytest.mark.parametrize("item", ["facts", "state"])
def test_a_checkpoint_that_cannot_be_read_stops_the_run_and_stays(three, lines, monkeypatch, item):
    for error in UNREADABLE:
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "_read", failing_read(error, item=item))
            with pytest.raises(
                RunError, match=r"the checkpoint of step 3 in .* cannot be read: .*--resume tries again"
            ):
                restored(three, lines)
        assert sorted(x.name for x in three.iterdir()) == ["2", "3"], error
    assert not lines
    assert restored(three, lines).step == 3


def test_a_folder_that_may_not_be_read_is_not_taken_for_missing_files(three, lines, monkeypatch):
    """What libraries say of a folder whose files they may not see."""
    monkeypatch.setattr(Checkpoints, "_read", failing_read(FileNotFoundError("no metadata"), item="state"))
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("lm.integrity.os.walk", lambda folder, onerror: onerror(denied))
    with pytest.raises(RunError, match="cannot be read: permission denied"):
        restored(three, lines)
    assert sorted(x.name for x in three.iterdir()) == ["2", "3"]


def test_a_checkpoint_set_aside_is_never_deleted(three, lines):
    (three / "damaged-3").mkdir()
    (three / "damaged-3" / "mine").write_text("still here")
    files_of(three / "3" / "state")[0].write_bytes(b"")
    again = Checkpoints(three, 1, lines)
    assert again.restore(like(state()), accept).step == 2
    for step in (3, 4, 5):  # more than are kept
        again.save(step, state(seed=step), {"model": "mine"})
    again.close()
    assert sorted(x.name for x in three.iterdir()) == ["5", "damaged-3", "damaged-3-2"]
    assert (three / "damaged-3" / "mine").read_text() == "still here"


def test_where_all_were_set_aside_a_second_start_is_refused_too(three, lines):
    for step in ("2", "3"):
        files_of(three / step / "state")[0].write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint is intact \(kept: damaged-2, damaged-3\): .*--overwrite"):
            restored(three, lines)


@pytest.mark.parametrize("change", [{"rows": 31}, {"step": 30}, None])
def test_facts_that_changed_are_damage(three, lines, change):
    path = three / "3" / "facts" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if change else [1]))
    assert restored(three, lines).step == 2
    assert lines[0].endswith("its metadata differs from what was saved")


def test_other_arrays_are_refused_and_nothing_is_set_aside(three, lines):
    other = like(state()) | {"more": jax.ShapeDtypeStruct((2,), jnp.float32)}
    again = Checkpoints(three, 2, lines)
    with pytest.raises(UserError, match=r"another model or optimizer: \['more'\] is missing instead of float32\[2\]"):
        again.restore(other, accept)
    again.close()
    assert sorted(x.name for x in three.iterdir()) == ["2", "3"]


def test_swapped_rows_and_elements_change_the_fingerprint():
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    same_size = (x, x[[0, 4, 2, 3, 1, 5]], x[:, ::-1], x.reshape(4, 6), x.view(np.int32))
    prints = fingerprint([jnp.asarray(y) for y in same_size])
    assert len(set(prints)) == len(prints)


def test_fingerprints_are_those_of_a_plain_loop():
    """Of every dtype that a state may have: the hash of (bits, index), summed."""

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    def expected(x):
        start = zlib.crc32(f"{x.dtype}{x.shape}".encode())
        bits = x.ravel().view(f"u{x.dtype.itemsize}").tolist()
        return (sum(mix((b + mix((i + start) % 2**32)) % 2**32) for i, b in enumerate(bits)) + start) % 2**32

    draw = np.random.default_rng(0)
    tree = [draw.integers(0, 100, (3, 4, 5)).astype(kind) for kind in (np.int32, np.uint8, jnp.bfloat16, np.float32)]
    tree += [np.array(7, np.uint32), draw.integers(0, 2, 6).astype(bool)]
    assert fingerprint([jnp.asarray(x) for x in tree]) == [expected(x) for x in tree]


@pytest.mark.parametrize(("name", "value"), [("wide", jnp.nan), ("narrow", -jnp.inf)])
def test_numbers_that_are_not_finite_are_not_saved(three, lines, name, value):
    given = state(seed=4)
    given[name] = given[name].at[5, 5].set(value)
    again = Checkpoints(three, 2, lines)
    with pytest.raises(RunError, match="of step 4 are not finite and are not saved; steps with a checkpoint: 2, 3"):
        again.save(4, given, {"model": "mine"})
    again.close()
    assert restored(three, lines).step == 3


def test_a_checkpoint_with_nan_is_set_aside_for_the_one_before(three, lines, monkeypatch):
    given = state(seed=4)
    given["wide"] = given["wide"].at[5, 5].set(jnp.nan)
    with monkeypatch.context() as patch:
        real = checkpoints_module.summarize
        patch.setattr(checkpoints_module, "summarize", lambda tree: real(tree)._replace(is_finite=True))
        older = Checkpoints(three, 2, lines)
        older.save(4, given, {"model": "mine"})
        older.close()
    assert restored(three, lines).step == 3
    assert lines == [
        f"the checkpoint of step 4 in {three} is damaged and is not used: not all of its values are finite"
    ]


def test_a_save_that_orbax_declines_is_an_error(three, lines):
    again = Checkpoints(three, 2, lines)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written to .*: a later checkpoint exists"):
        again.save(1, state(seed=1), {"model": "mine"})
    again.close()


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, lines, monkeypatch):
    released = threading.Event()
    real = Checkpoints.wait
    monkeypatch.setattr(Checkpoints, "wait", lambda self: (released.wait(0.2), real(self)))
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, 2, lines) as checkpoints:
        checkpoints.save(1, state(seed=1), {"model": "mine"})
        raise ZeroDivisionError
    assert checkpoints.steps() == [1]
    assert not lines
    assert restored(tmp_path, lines).step == 1


def test_an_error_does_not_wait_for_ever(tmp_path, lines, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(checkpoints_module, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(checkpoints_module, "is_stuck", threading.Event())
    checkpoints = Checkpoints(tmp_path, 2, lines)
    checkpoints.save(1, state(seed=1), {"model": "mine"})
    monkeypatch.setattr(checkpoints, "wait", lambda: ended.wait(60))
    with pytest.raises(ZeroDivisionError), checkpoints:
        raise ZeroDivisionError
    assert lines == ["the checkpoint of step 1 was not written within 0 s and was abandoned"]
    assert checkpoints_module.is_stuck.is_set()
    ended.set()
    monkeypatch.undo()
    checkpoints.close()
