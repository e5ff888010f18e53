"""The commands for slides: embeddings and heat maps, errors in one line, resumed runs, comparison and training."""

import csv

import compare_gigapath
import jax
import numpy as np
import pytest
import slide_classification
import slide_encoder
from slides.synthetic import random_weights, synthetic_slide
from slides.tiles import SlideError, write_slide

from ringjax.models import SlideEncoder

WIDTH = 12


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def weights():
    return random_weights(np.random.default_rng(0), layers=2, features=64, width=WIDTH)


@pytest.fixture
def cohort(tmp_path, weights):
    """A folder with two slides and a damaged one, and a file of weights."""
    folder = tmp_path / "features"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, num_tiles in (("a", 30), ("b", 50)):
        write_slide(folder / f"{name}.npz", synthetic_slide(rng, num_tiles, WIDTH))
    np.savez(tmp_path / "weights.npz", **weights)
    return tmp_path


def run(cohort, *more, out="out.npz"):
    files = ["--tiles", str(cohort / "features"), "--weights", str(cohort / "weights.npz"), "--out", str(cohort / out)]
    return slide_encoder.main([*files, *more])


def test_embeddings_are_those_of_the_encoder(cohort, weights, capsys):
    assert run(cohort, "--heatmap", str(cohort / "maps")) == 0
    assert "out.npz: 2 embeddings of shape (64,)" in capsys.readouterr().out
    encoder = SlideEncoder.from_gigapath(weights, dtype="float32")
    with np.load(cohort / "out.npz") as found, np.load(cohort / "features" / "b.npz") as slide:
        assert found["names"].tolist() == ["a", "b"]
        assert found["num_tiles"].tolist() == [30, 50]
        expected = encoder(slide["features"][None], slide["coords"][None])
        np.testing.assert_allclose(found["embeddings"][1], expected[0], atol=1e-5)
    for name in ("a", "b"):
        assert (cohort / "maps" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bad_slide_is_reported_and_the_others_are_processed(cohort, capsys):
    (cohort / "features" / "bad.npz").write_bytes(b"x")
    assert run(cohort, "--pool", "mean", "--all-layers") == 1
    streams = capsys.readouterr()
    (line,) = [x for x in streams.out.splitlines() if x.startswith("FAILED")]
    assert "bad.npz: not a complete npz file" in line
    assert streams.err == "slide_encoder: 1 of 3 slides failed, see above\n"
    with np.load(cohort / "out.npz") as found:
        assert found["embeddings"].shape == (2, 3, 64)


def test_interrupted_run_is_continued(cohort, capsys, monkeypatch):
    process = slide_encoder.process_slide

    def interrupted(encoder, job, results, options):
        if job.name == "b":
            raise KeyboardInterrupt
        return process(encoder, job, results, options)

    with monkeypatch.context() as patch:
        patch.setattr(slide_encoder, "process_slide", interrupted)
        assert run(cohort) == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    processed = []
    monkeypatch.setattr(slide_encoder, "process_slide", lambda *x: processed.append(x[1].name) or process(*x))
    assert run(cohort) == 0
    assert processed == ["b"]
    assert "1 of 2 slides are finished" in capsys.readouterr().out


def bad_calls(cohort):
    """Returns options and the line that each gives."""
    good = {"tiles": cohort / "features", "weights": cohort / "weights.npz", "out": cohort / "out.npz"}
    np.savez(cohort / "other.npz", **{"blocks.0.attn.qkv.weight": np.ones((8, 8), np.float32)})
    yield good | {"weights": cohort / "other.npz"}, "other.npz: `state_dict` must be that of Prov-GigaPath's"
    yield good | {"weights": cohort / "none.pth"}, "none.pth: no such file"
    yield good | {"tiles": cohort / "none"}, "none: no such file or folder"
    yield good | {"out": cohort / "out.csv"}, "out.csv: the name of the output must end in .npz"
    yield good | {"heatmap": cohort / "map.png"}, "map.png: --heatmap must be a folder for 2 slides"
    yield good | {"out": cohort / "no" / "out.npz"}, "out.npz: cannot be written"


def test_bad_options_give_one_line(cohort, capsys):
    for options, message in bad_calls(cohort):
        code = slide_encoder.main([word for name, x in options.items() for word in (f"--{name}", str(x))])
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == (2, 1), error
        assert error.startswith("slide_encoder: ")
        assert message in error


def test_missing_options_are_named(capsys):
    with pytest.raises(SystemExit):
        slide_encoder.main(["--tiles", "x.h5"])
    assert "--weights and --out must be given" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        slide_encoder.main(["--demo", "x", "--out", "y.npz"])
    assert "--demo must be given without" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_needs_no_data(tmp_path, capsys):
    assert slide_encoder.main(["--demo", str(tmp_path)]) == 0
    assert (tmp_path / "map.png").exists()
    assert "1 embedding of shape (768,)" in capsys.readouterr().out


@pytest.fixture
def one_slide(tmp_path, monkeypatch):
    """A slide, weights and the states that ringjax computes, as the original's environment would save them."""
    monkeypatch.setattr(compare_gigapath, "WIDTH", WIDTH)
    np.savez(tmp_path / "weights.npz", **random_weights(np.random.default_rng(0), layers=2, features=64, width=WIDTH))
    write_slide(tmp_path / "slide.npz", synthetic_slide(np.random.default_rng(1), 40, WIDTH))
    slide = compare_gigapath.read_slide(tmp_path / "slide.npz", WIDTH)
    return tmp_path, compare_gigapath.run_ours(slide, tmp_path / "weights.npz")


def compared(folder, states, dtype="float32"):
    np.savez(folder / "original.npz", dtype=dtype, **states)
    files = {"tiles": "slide.npz", "weights": "weights.npz", "file": "original.npz"}
    words = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    return compare_gigapath.main(["compare", *words])


def test_comparison_prints_the_largest_difference(one_slide, capsys):
    folder, ours = one_slide
    assert ours["cls"].shape == ours["mean"].shape == (4, 64)  # input, two layers, output
    states = {pool: x.copy() for pool, x in ours.items()}
    assert compared(folder, states) == 0
    assert "within 1e-04" in capsys.readouterr().out
    states["mean"][2] += 0.01 * np.abs(states["mean"][2]).max()
    assert compared(folder, states) == 1
    out = capsys.readouterr().out
    assert "(layer 2, mean)" in out
    assert "NOT within 1e-04" in out
    assert compared(folder, states, "float16") == 0
    assert compared(folder, {pool: x[:2] for pool, x in states.items()}) == 2
    assert "other weights?" in capsys.readouterr().err


def test_batches_hold_every_slide_once():
    data = slide_classification.synthetic_dataset(11, seed=0)
    for rng in (None, np.random.default_rng(0)):
        batches = data.batches(4, rng)
        assert len(batches) == 3
        lengths = [n for batch in batches for n, label in zip(batch.lengths, batch.labels, strict=True) if label >= 0]
        assert sorted(lengths) == sorted(len(x.features) for x in data.slides)
    assert all(not batch.tiles[i, n:].any() for batch in batches for i, n in enumerate(batch.lengths) if n > 1)


def test_own_slides_are_read_with_their_labels(tmp_path):
    rng = np.random.default_rng(0)
    for name in "abcd":
        write_slide(tmp_path / f"{name}.npz", synthetic_slide(rng, 20, WIDTH))
    labels = tmp_path / "labels.csv"
    with labels.open("w", newline="") as stream:
        csv.writer(stream).writerows([["a", "tumor"], ["b", "normal"], ["c", "normal"], ["d", "tumor"]])
    data, classes = slide_classification.own_dataset([str(tmp_path)], labels, WIDTH)
    assert classes == ["normal", "tumor"]
    assert data.labels.tolist() == [1, 0, 0, 1]
    train, test = slide_classification.split(data)
    assert len(train.slides) == len(test.slides) == 2
    assert sorted(test.labels) == [0, 1]
    labels.write_text("a,tumor\n")
    with pytest.raises(SlideError, match="no label for 3 slides, such as b"):
        slide_classification.own_dataset([str(tmp_path)], labels, WIDTH)


@pytest.mark.slow
def test_training_starts_from_weights_of_gigapath(cohort, capsys):
    for name in ("c", "d"):
        write_slide(cohort / "features" / f"{name}.npz", synthetic_slide(np.random.default_rng(1), 40, WIDTH))
    (cohort / "labels.csv").write_text("a,tumor\nb,normal\nc,normal\nd,tumor\n")
    files = {"tiles": "features", "labels": "labels.csv", "weights": "weights.npz", "out": "run"}
    words = [word for name, file in files.items() for word in (f"--{name}", str(cohort / file))]
    assert slide_classification.main([*words, "--epochs", "2", "--batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 slides to train with, 2 to test with, classes normal, tumor" in out
    assert "epoch   2 of 2" in out


@pytest.mark.slow
def test_planted_lesion_is_learned_and_training_is_continued(tmp_path, capsys):
    assert slide_classification.main(["--out", str(tmp_path), "--epochs", "6"]) == 0
    accuracy = float(capsys.readouterr().out.splitlines()[-1].split("%")[0])
    assert accuracy > 85
    assert slide_classification.main(["--out", str(tmp_path), "--epochs", "6"]) == 0  # nothing is left to do
    out = capsys.readouterr().out
    assert "continuing after epoch 6" in out
    assert float(out.splitlines()[-1].split("%")[0]) == accuracy
