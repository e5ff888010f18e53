"""The checkpoints of `examples/train_lm.py`: whole or not at all, on any mesh, and none of another model."""

import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from lm.checkpoints import CheckpointError, Checkpoints, fingerprint
from lm.flags import UserError


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


@pytest.fixture
def three(tmp_path, lines):
    """Checkpoints of steps 2 and 3; that of step 1 was the third last."""
    checkpoints = Checkpoints(tmp_path / "run", 2, lines)
    for step in (1, 2, 3):
        checkpoints.save(step, state(seed=step), {"model": "mine", "rows": 10 * step})
    checkpoints.close()
    return tmp_path / "run"


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
    assert "its arrays are not those that were saved" in lines[0]


def test_none_whole_is_an_error_not_a_new_beginning(three, lines):
    for step in ("2", "3"):
        files_of(three / step / "state")[0].write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint is whole"):
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
