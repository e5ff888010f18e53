"""The data of `examples/train_lm.py`: packed documents, each device's part, shuffles that resume."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lm import data
from lm.flags import UserError

import ringjax as rj
from ringjax.models import next_token_targets

LENGTH = 32


@pytest.fixture
def texts(tmp_path):
    """Files of 1 to 70 bytes, all bytes of a file the same."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i + 65]) * (1 + i * 69 // 39))
    return tmp_path


def sharding(data_size=1, ring=1):
    mesh = jax.make_mesh((data_size, ring), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(None, "data", "ring"))


def whole(documents, seed=0, **options):
    return data.Batches(documents, LENGTH, sharding(), seed=seed, **options)


def test_an_epoch_has_every_byte_once(texts):
    train = data.read_documents([str(texts)]).train
    batches = whole(train)
    size = sum(x.size for x in train)
    assert batches.rows == math.ceil(size / LENGTH)
    orders = []
    for epoch in (0, 1):
        batch = batches.batch(epoch * batches.rows, 1, batches.rows)
        tokens, ids = np.asarray(batch.tokens)[0], np.asarray(batch.segment_ids)[0]
        assert (ids < 0).sum() == batches.rows * LENGTH - size
        found = np.bincount(tokens[ids >= 0], minlength=256)
        expected = {int(path.name[:2]) + 65: path.stat().st_size for path in map(pathlib.Path, {x.path for x in train})}
        assert {i: int(n) for i, n in enumerate(found) if n} == expected
        orders.append(tokens.tolist())
    assert orders[0] != orders[1]
    assert whole(train).batch(0, 1, batches.rows).tokens.tolist()[0] == orders[0]
    assert whole(train, seed=1).batch(0, 1, batches.rows).tokens.tolist()[0] != orders[0]


def test_targets_and_segments_are_those_of_packed_documents(texts):
    train = data.read_documents([str(texts)]).train
    batches = whole(train)
    batch = batches.batch(0, 1, batches.rows)
    tokens, ids = batch.tokens[0], np.asarray(batch.segment_ids[0])
    targets, weights = next_token_targets(tokens, jnp.asarray(ids))
    assert batch.targets[0].tolist() == targets.tolist()
    assert batch.weights[0].tolist() == weights.tolist()
    # a file is one byte over and over, so documents end where bytes change
    changes = (np.diff(np.asarray(tokens)) != 0) & (ids[:, 1:] >= 0)
    assert ((np.diff(ids) == 1) == changes)[ids[:, 1:] >= 0].all()
    assert changes.any()
    assert (ids[:, 0] == 0).all()


@pytest.mark.parametrize(("layout", "size"), [("zigzag", (2, 4)), ("contiguous", (1, 8)), ("zigzag", (4, 1))])
def test_each_device_holds_its_part_in_the_order_of_the_ring(texts, layout, size):
    train = data.read_documents([str(texts)]).train
    plain = whole(train, seed=3).batch(5, 2, 4)
    ring = data.Batches(train, LENGTH, sharding(*size), (layout, size[1]), seed=3).batch(5, 2, 4)
    for name, x, y in zip(data.Batch._fields, plain, ring, strict=True):
        stored = rj.to_layout(x, layout, size[1], axis=2)
        assert y.tolist() == stored.tolist(), name
        assert y.sharding.is_equivalent_to(sharding(*size), 3)


def test_a_device_reads_its_own_chunks_and_nothing_else(texts, monkeypatch):
    train = data.read_documents([str(texts)]).train
    read = []
    plain = data.Stream.read
    monkeypatch.setattr(
        data.Stream, "read", lambda self, start, stop: read.append((start, stop)) or plain(self, start, stop)
    )
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batches = data.Batches(train, LENGTH, one, ("zigzag", 4), seed=None)
    batches.read(2, batches.positions[8:16])  # device 1 of the ring: chunks 1 and 6 of 8, and the byte after each
    assert read == [(2 * LENGTH + 4, 2 * LENGTH + 9), (2 * LENGTH + 24, 2 * LENGTH + 29)]
    read.clear()
    data.Batches(train, LENGTH, sharding(1, 8), ("zigzag", 8), seed=None).batch(0, 1, 3)
    assert len(read) == 3 * 15  # each chunk once for all four arrays; those of the last device are neighbors
    assert sum(stop - start for start, stop in read) == 3 * (LENGTH + 15)


def test_micro_batches_are_the_same_rows(texts):
    batches = whole(data.read_documents([str(texts)]).train)
    together, apart = batches.batch(4, 1, 6), batches.batch(4, 3, 2)
    assert together.tokens.reshape(3, 2, LENGTH).tolist() == apart.tokens.tolist()


def test_validation_reads_held_out_documents_once(texts):
    split = data.read_documents([str(texts)])
    assert len(split.held_out) == 2
    assert not {x.path for x in split.train} & {x.path for x in split.held_out}
    assert data.read_documents([str(texts)]) == split
    batches = whole(split.held_out, seed=None)
    batch = batches.batch(0, 1, batches.rows + 2)
    assert (np.asarray(batch.segment_ids) >= 0).sum() == sum(x.size for x in split.held_out)
    assert (np.asarray(batch.segment_ids)[0, batches.rows :] == -1).all()
    assert np.asarray(batch.weights)[0, batches.rows :].sum() == 0


def test_one_file_is_cut_in_two(tmp_path):
    path = tmp_path / "one"
    path.write_bytes(bytes(range(32, 232)))
    split = data.read_documents([str(path)])
    assert (split.train[0].stop, split.held_out[0].start, split.held_out[0].stop) == (190, 190, 200)
    held_out = whole(split.held_out, seed=None).read(0, np.arange(LENGTH))
    assert held_out[0].tolist() == [*range(222, 232), *[0] * 22]


def test_unigram_entropy(tmp_path):
    (tmp_path / "a").write_bytes(b"ab" * 50)
    (tmp_path / "b").write_bytes(b"cd" * 50)
    documents = [data.Document(str(tmp_path / name), 0, 100) for name in "ab"]
    assert data.unigram_entropy(documents) == pytest.approx(math.log(4))


def test_standard_library():
    split = data.read_documents([])
    names = {pathlib.Path(x.path).name for x in (*split.train, *split.held_out)}
    assert {"argparse.py", "tokenize.py"} <= names
    assert not any("site-packages" in x.path for x in split.train)
    assert 1.5 < data.unigram_entropy(split.train[:20]) < 4.5


def test_paths_that_cannot_be_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for path, message in (
        ("missing", "no such file or folder"),
        ("texts", "no bytes to train on"),
        ("texts/*.md", "no such file or folder"),
        ("dangling", "cannot be read: No such file or directory"),
    ):
        with pytest.raises(UserError, match=message):
            data.read_documents([str(tmp_path / path)])
