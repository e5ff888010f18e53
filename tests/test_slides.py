"""The parts of the slide examples: files of tiles and weights, their errors in one line, and resumed outputs."""

import argparse
import collections
import io
import json
import pickle
import struct
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest
from slides.output import Embeddings
from slides.synthetic import random_weights, synthetic_slide
from slides.tiles import Slide, SlideError, find_slides, read_slide, write_slide
from slides.weights import read_weights

WIDTH = 12


@pytest.fixture
def slide() -> Slide:
    return synthetic_slide(np.random.default_rng(0), 40, WIDTH)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_slide_is_read_as_it_was_written(slide, tmp_path, suffix):
    if suffix == ".h5":
        pytest.importorskip("h5py")
    path = tmp_path / f"slide{suffix}"
    write_slide(path, slide._replace(tile_size=512.0))
    found = read_slide(path, WIDTH)
    np.testing.assert_array_equal(found.features, slide.features)
    np.testing.assert_array_equal(found.coordinates, slide.coordinates)
    assert found.tile_size == 512
    assert read_slide(path, WIDTH, tile_size=256).tile_size == 256


def test_leading_axis_of_one_and_half_precision_are_accepted(slide, tmp_path):
    path = save(tmp_path / "a.npz", features=slide.features[None].astype(np.float16), coords=slide.coordinates[None])
    found = read_slide(path, WIDTH)
    assert found.features.shape == (40, WIDTH)
    assert found.features.dtype == np.float32
    assert found.coordinates.shape == (40, 2)
    assert found.tile_size == 256


def with_nan(x):
    x = x.copy()
    x[7, 3] = np.nan
    return x


def moved(coordinates, tile, to):
    coordinates = coordinates.copy()
    coordinates[tile] = to
    return coordinates


BAD_SLIDES = {
    "no coordinates": (
        lambda f, c: {"features": f},
        r"no dataset `coords` \(coordinates of the tiles\); found features",
    ),
    "no features": (lambda f, c: {"coords": c, "feats": f}, r"no dataset `features` .*; found coords, feats"),
    "width": (
        lambda f, c: {"features": f[:, :5], "coords": c},
        r"the model takes 12 features per tile, got 5: another",
    ),
    "NaN": (lambda f, c: {"features": with_nan(f), "coords": c}, r"features of 1 of 40 tiles are NaN .* first tile 7$"),
    "integers": (lambda f, c: {"features": f.astype(int), "coords": c}, r"`features` must be .*, got int64 of shape"),
    "no tiles": (lambda f, c: {"features": f[:0], "coords": c[:0]}, r"`features` must be .* of shape \(0, 12\)"),
    "one dimension": (lambda f, c: {"features": f[0], "coords": c}, r"`features` must be .* of shape \(12,\)"),
    "lengths": (lambda f, c: {"features": f, "coords": c[:5]}, r"`coords` must be \(40, 2\) numbers, got .*\(5, 2\)"),
    "words": (lambda f, c: {"features": f, "coords": c.astype(str)}, r"`coords` must be \(40, 2\) numbers, got <U"),
    "grid": (
        lambda f, c: {"features": f, "coords": moved(c, 9, (0, 256_000))},
        r"tile 9 at \(0, 256000\) lies outside the model's grid of 1000 x 1000 tiles of 256 pixels",
    ),
    "negative": (lambda f, c: {"features": f, "coords": moved(c, 2, (-1, 0))}, r"tile 2 at \(-1, 0\) lies outside"),
    "coordinate NaN": (lambda f, c: {"features": f, "coords": moved(c * 1.0, 2, np.nan)}, r"tile 2 at \(nan, nan\)"),
    "size": (
        lambda f, c: {"features": f, "coords": c, "patch_size_level0": 0},
        r"tile size must be above 0 pixels, got 0",
    ),
    "pickle": (lambda f, c: {"features": f.astype(object), "coords": c}, r"not a complete npz file"),
}


@pytest.mark.parametrize("name", BAD_SLIDES)
def test_bad_slide_is_reported_in_one_line(slide, tmp_path, name):
    arrays, message = BAD_SLIDES[name]
    path = save(tmp_path / "slide.npz", **arrays(slide.features, slide.coordinates))
    with pytest.raises(SlideError, match=message) as caught:
        read_slide(path, WIDTH)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_corrupt_file_is_reported_in_one_line(slide, tmp_path, suffix, damage):
    if suffix == ".h5":
        pytest.importorskip("h5py")
    path = tmp_path / f"slide{suffix}"
    write_slide(path, slide)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "noise": b"x" * 1000}[damage])
    with pytest.raises(SlideError, match=r"not a complete (npz|HDF5) file") as caught:
        read_slide(path, WIDTH)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(SlideError, match="need the package h5py: pip install h5py"):
        read_slide(tmp_path / "slide.h5", WIDTH)


def test_slides_are_found_in_files_and_folders(slide, tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    for name in ("b.npz", "a.npz", "notes.txt"):
        write_slide(folder / name, slide) if name.endswith(".npz") else (folder / name).write_text("")
    write_slide(tmp_path / "c.npz", slide)
    assert list(find_slides([str(folder), str(tmp_path / "c.npz")])) == ["a", "b", "c"]
    write_slide(tmp_path / "a.npz", slide)
    with pytest.raises(SlideError, match="another slide has the same name"):
        find_slides([str(folder), str(tmp_path / "a.npz")])
    with pytest.raises(SlideError, match="no such file or folder"):
        find_slides([str(tmp_path / "d.npz")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SlideError, match="no file ends in"):
        find_slides([str(tmp_path / "empty")])


def write_pth(path, content: dict, *, prefix: str = "archive") -> None:
    """Writes what `torch.save` writes, for arrays of float32 and bfloat16, without PyTorch."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def _rebuild_tensor_v2(*_):
        pass

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    for name in ("FloatStorage", "BFloat16Storage"):
        setattr(torch, name, type(name, (), {"__module__": "torch", "__qualname__": name}))
    storages: list[np.ndarray] = []

    class Storage:
        def __init__(self, array):
            self.array = array

    class Pickler(pickle.Pickler):
        def reducer_override(self, x):
            if not isinstance(x, np.ndarray):
                return NotImplemented
            base = np.ascontiguousarray(x.T if x.ndim == 2 else x)  # matrices are stored transposed, to test strides
            strides = (1, x.shape[0]) if x.ndim == 2 else tuple(s // x.itemsize for s in base.strides)
            return _rebuild_tensor_v2, (Storage(base), 0, x.shape, strides, False, collections.OrderedDict())

        def persistent_id(self, x):
            if not isinstance(x, Storage):
                return None
            storages.append(x.array)
            kind = torch.BFloat16Storage if x.array.dtype == ml_dtypes.bfloat16 else torch.FloatStorage
            return "storage", kind, str(len(storages) - 1), "cpu", x.array.size

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        stream = io.BytesIO()
        Pickler(stream, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{prefix}/data.pkl", stream.getvalue())
        for i, array in enumerate(storages):
            file.writestr(f"{prefix}/data/{i}", array.tobytes())


def write_safetensors(path, arrays: dict) -> None:
    header, data, kinds = {"__metadata__": {"format": "pt"}}, b"", {"float32": "F32", "bfloat16": "BF16"}
    for name, x in arrays.items():
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": kinds[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    narrow = rng.standard_normal(7).astype(ml_dtypes.bfloat16)
    return {
        "matrix": rng.standard_normal((3, 4)).astype(np.float32),
        "token": np.ones((1, 1, 2), np.float32),
        "n": narrow,
    }


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_weights_are_read_as_they_were_written(arrays, tmp_path, suffix, is_wrapped):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        # checkpoints of training runs contain objects of other classes, which are ignored
        wrapped = {"model": arrays, "args": argparse.Namespace(epochs=3), "epoch": 7}
        write_pth(path, wrapped if is_wrapped else arrays)
    elif suffix == ".safetensors":
        write_safetensors(path, arrays)
    else:
        arrays.pop("n")  # numpy stores no bfloat16
        np.savez(path, **arrays)
    found = read_weights(path)
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


class Attack:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('attacked').touch()",)


def test_code_in_weights_is_not_run(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pth"
    write_pth(path, {"model": arrays, "extra": Attack()})
    assert read_weights(path).keys() == arrays.keys()
    assert not (tmp_path / "attacked").exists()
    pickle.loads(pickle.dumps(Attack()))  # the attack works on plain pickle
    assert (tmp_path / "attacked").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_damaged_weights_are_reported_in_one_line(arrays, tmp_path, suffix, damage):
    path = tmp_path / f"weights{suffix}"
    arrays.pop("n")
    {".pth": write_pth, ".safetensors": write_safetensors, ".npz": lambda p, a: np.savez(p, **a)}[suffix](path, arrays)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) - 20], "empty": b"", "noise": b"x" * 1000}[damage])
    with pytest.raises(SlideError, match=rf"^{path}: not a ") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


def test_other_weight_files_are_reported(tmp_path):
    with pytest.raises(SlideError, match="no such file"):
        read_weights(tmp_path / "weights.pth")
    with pytest.raises(SlideError, match=r"must end in \.pth"):
        read_weights(tmp_path / "weights.onnx")
    write_pth(tmp_path / "numbers.pth", {"epoch": 3})
    with pytest.raises(SlideError, match="holds no state dict"):
        read_weights(tmp_path / "numbers.pth")


def test_arrays_beyond_their_storage_are_refused(tmp_path):
    path = tmp_path / "weights.pth"
    write_pth(path, {"x": np.ones(4, np.float32)})
    with zipfile.ZipFile(path) as file:
        content = file.read("archive/data.pkl").replace(b"K\x04", b"K\x09")  # the size of the storage and of the array
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/data/0", np.ones(4, np.float32).tobytes())
    with pytest.raises(SlideError, match=r"not a complete \.pth file"):
        read_weights(path)


def test_embeddings_are_saved_and_resumed(tmp_path):
    slide, out, settings = tmp_path / "slide.npz", tmp_path / "out.npz", {"pool": "cls"}
    save(slide, x=np.ones(1))
    results = Embeddings(out, settings)
    results.add("slide", slide, np.arange(3.0), num_tiles=5)
    results.save()
    with np.load(out) as file:
        assert file["names"].tolist() == ["slide"]
        assert file["embeddings"].tolist() == [[0, 1, 2]]
        assert file["num_tiles"].tolist() == [5]
    again = Embeddings(out, settings)
    assert again.has("slide", slide)
    assert not again.has("other", slide)
    save(slide, x=np.ones(2))  # written again
    assert not again.has("slide", slide)
    assert list(tmp_path.glob(".*")) == []


def test_embeddings_of_other_settings_are_not_continued(tmp_path):
    slide, out = save(tmp_path / "slide.npz", x=np.ones(1)), tmp_path / "out.npz"
    results = Embeddings(out, {"pool": "cls"})
    results.add("slide", slide, np.arange(3.0), num_tiles=5)
    results.save()
    with pytest.raises(SlideError, match="was written with pool=cls, not mean"):
        Embeddings(out, {"pool": "mean"})
    assert not Embeddings(out, {"pool": "mean"}, overwrite=True).entries
    out.write_bytes(b"x")
    with pytest.raises(SlideError, match="not a file of embeddings"):
        Embeddings(out, {"pool": "cls"})
    with pytest.raises(SlideError, match=r"must end in \.npz"):
        Embeddings(tmp_path / "out.csv", {})


def test_synthetic_slide_is_connected_tissue_with_distinct_tiles():
    slide = synthetic_slide(np.random.default_rng(3), 200, WIDTH)
    cells = {tuple(x) for x in slide.coordinates // 256}
    assert len(cells) == 200
    neighbors = sum((x + 1, y) in cells or (x - 1, y) in cells for x, y in cells)
    assert neighbors > 190


def test_random_weights_have_the_shapes_of_the_original():
    weights = random_weights(np.random.default_rng(0), layers=1)
    assert weights["patch_embed.proj.weight"].shape == (768, 1536)
    assert weights["encoder.layers.0.ffn.fc1.weight"].shape == (3072, 768)
    assert len(weights) == 1 + 2 + 6 * 2 + 4 * 2 + 4
