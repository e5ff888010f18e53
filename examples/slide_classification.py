"""Trains a slide encoder to classify slides: synthetic ones with a planted signal, or your own.

    python examples/slide_classification.py                       # synthetic, about two minutes on two cores
    python examples/slide_classification.py --tiles features/ --labels labels.csv --weights slide_encoder.pth

Half of the synthetic slides have a lesion: 3% of their tiles, next to each other, are shifted in one direction by less
than the noise of a tile. Slides have 100 to 500 tiles and are trained in padded batches; padding has no influence. The
labels of your own slides are lines `name,label` in a CSV file, where `name` is a file name without its suffix.

Training state is saved after every epoch, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from slides.synthetic import synthetic_slide
from slides.tiles import Slide, SlideError, find_slides, read_slide
from slides.weights import read_weights

import ringjax as rj
from ringjax.models import LongNetConfig, SlideEncoder, layer_decay

WIDTH = 32  # features of a synthetic tile


class Batch(NamedTuple):
    """Slides padded to a common length."""

    tiles: np.ndarray  # (B, L, width)
    coordinates: np.ndarray  # (B, L, 2), in tiles
    lengths: np.ndarray  # (B,)
    labels: np.ndarray  # (B,), -1 for slides that fill up a batch


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Slides with their labels, from 0 to the number of classes - 1."""

    slides: list[Slide]
    labels: np.ndarray

    def batches(self, size: int, rng: np.random.Generator | None = None) -> list[Batch]:
        """Returns batches of slides of similar length, in random order with an `rng`."""
        sizes = np.array([len(x.features) for x in self.slides], float)
        order = np.argsort(sizes if rng is None else sizes + rng.uniform(0, 100, len(sizes)), kind="stable")
        found = [self._batch(order[i : i + size], size) for i in range(0, len(order), size)]
        return found if rng is None else [found[i] for i in rng.permutation(len(found))]

    def _batch(self, chosen: np.ndarray, size: int) -> Batch:
        slides = [self.slides[i] for i in chosen]
        longest = max(len(x.features) for x in slides)
        longest = -(-longest // 128) * 128  # few different shapes, so that few programs are compiled
        tiles = np.zeros((size, longest, slides[0].features.shape[1]), np.float32)
        batch = Batch(tiles, np.zeros((size, longest, 2), np.int32), np.ones(size, np.int32), np.full(size, -1))
        for i, (slide, label) in enumerate(zip(slides, self.labels[chosen], strict=True)):
            num = batch.lengths[i] = len(slide.features)
            batch.tiles[i, :num], batch.coordinates[i, :num] = slide.features, slide.coordinates // slide.tile_size
            batch.labels[i] = label
        return batch


class Classifier(nnx.Module):
    """A slide encoder and a linear layer."""

    def __init__(self, encoder: SlideEncoder, classes: int, *, rngs: nnx.Rngs) -> None:
        self.encoder = encoder
        self.head = nnx.Linear(encoder.config.features, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, batch: Batch, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Returns logits (B, classes)."""
        where = {"pool": "mean", "tile_size": 1, "dropout_rng": dropout_rng}
        return self.head(self.encoder(batch.tiles, batch.coordinates, batch.lengths, **where))


def synthetic_dataset(num_slides: int, seed: int) -> Dataset:
    """Returns slides of which every second one has a lesion."""
    rng = np.random.default_rng([1, seed])
    direction = np.random.default_rng(2).standard_normal(WIDTH)
    lesion = 4 * direction / np.linalg.norm(direction)  # noise has a norm of about 5.7
    labels = np.arange(num_slides) % 2
    sizes = rng.integers(100, 501, num_slides)
    slides = [
        synthetic_slide(rng, size, WIDTH, lesion=lesion if label else None, share=0.03)
        for size, label in zip(sizes, labels, strict=True)
    ]
    return Dataset(slides, labels)


def own_dataset(tiles: list[str], labels: pathlib.Path, width: int) -> tuple[Dataset, list[str]]:
    """Reads slides and labels, and returns them with the names of the classes.

    Raises:
        SlideError: If a file cannot be used, a slide has no label, or there are fewer than two classes.
    """
    try:
        with labels.open(newline="", encoding="utf-8") as stream:
            named = {row[0].strip(): row[1].strip() for row in csv.reader(stream) if len(row) > 1}
    except (OSError, UnicodeDecodeError) as error:
        raise SlideError(f"{labels}: cannot be read ({error})") from error
    files = find_slides(tiles)
    if missing := [name for name in files if name not in named]:
        raise SlideError(f"{labels}: no label for {len(missing)} slides, such as {missing[0]}")
    classes = sorted({named[name] for name in files})
    if len(classes) < 2:
        raise SlideError(f"{labels}: all slides have the label {classes[0]}")
    numbers = np.array([classes.index(named[name]) for name in files])
    return Dataset([read_slide(file, width) for file in files.values()], numbers), classes


def split(data: Dataset, share: float = 0.25) -> tuple[Dataset, Dataset]:
    """Returns slides to train with and a random share of each class to test with."""
    rng, is_test = np.random.default_rng(0), np.zeros(len(data.labels), bool)
    for label in np.unique(data.labels):
        (members,) = np.nonzero(data.labels == label)
        is_test[rng.permutation(members)[: max(1, round(share * len(members)))]] = True
    parts = [np.nonzero(~is_test)[0], np.nonzero(is_test)[0]]
    train, test = (Dataset([data.slides[i] for i in part], data.labels[part]) for part in parts)
    return train, test


def small_encoder() -> SlideEncoder:
    """Returns an encoder for the synthetic slides, with random parameters."""
    pattern = rj.DilationPattern((64, 256, 1024), (1, 2, 4))
    config = LongNetConfig.tiny(
        features=48, input_features=WIDTH, positions=None, pattern=pattern, dropout_rate=0.1, drop_path_rate=0.1
    )
    return SlideEncoder(config, rngs=nnx.Rngs(0))


def loss_of(model: Classifier, batch: Batch, dropout_rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss and the number of right answers."""
    logits, is_real = model(batch, dropout_rng).astype(jnp.float32), batch.labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.labels, 0))
    right = is_real & (logits.argmax(axis=1) == batch.labels)
    return jnp.sum(losses * is_real) / is_real.sum(), right.sum()


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(graph: Any, optimizer: optax.GradientTransformation, state: dict, batch: Batch) -> tuple[dict, Any]:
    """Updates parameters and optimizer state with one batch; returns them with the loss and the right answers."""
    key = jax.random.fold_in(jax.random.key(0), state["step"])
    of_parameters = lambda parameters: loss_of(nnx.merge(graph, parameters), batch, key)  # noqa: E731
    found, gradient = jax.value_and_grad(of_parameters, has_aux=True)(state["parameters"])
    updates, moments = optimizer.update(gradient, state["moments"], state["parameters"])
    parameters = optax.apply_updates(state["parameters"], updates)
    return {"parameters": parameters, "moments": moments, "step": state["step"] + 1}, found


@functools.partial(jax.jit, static_argnums=0)
def num_right(graph: Any, parameters: Any, batch: Batch) -> jax.Array:
    return loss_of(nnx.merge(graph, parameters), batch, None)[1]


def accuracy(graph: Any, parameters: Any, data: Dataset, batch_size: int) -> float:
    """Returns the share of right answers."""
    right = sum(int(num_right(graph, parameters, batch)) for batch in data.batches(batch_size))
    return right / len(data.labels)


def train(
    model: Classifier,
    data: Dataset,
    test: Dataset,
    folder: pathlib.Path,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> tuple[Classifier, float]:
    """Trains a model, or continues from `folder`, and returns it with its accuracy on `test`."""
    graph, parameters = nnx.split(model)
    steps = epochs * -(-len(data.labels) // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 10), steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05), layer_decay(model, 0.95)
    )
    state = {"parameters": parameters, "moments": optimizer.init(parameters), "step": jnp.zeros((), jnp.int32)}
    options = ocp.CheckpointManagerOptions(max_to_keep=1, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as checkpoints:
        first = checkpoints.latest_step() or 0  # the number of finished epochs
        if first:
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
            print(f"continuing after epoch {first}, from {folder}")
        for epoch in range(first, epochs):
            start, losses, right = time.perf_counter(), [], 0
            for batch in data.batches(batch_size, np.random.default_rng(epoch)):
                state, (loss, correct) = train_step(graph, optimizer, state, batch)
                losses.append(float(loss))
                right += int(correct)
            checkpoints.save(epoch + 1, args=ocp.args.StandardSave(state))
            seconds = time.perf_counter() - start
            line = (
                f"epoch {epoch + 1:3d} of {epochs}   loss {np.mean(losses):.3f}   right {right / len(data.labels):6.1%}"
            )
            held_out = accuracy(graph, state["parameters"], test, batch_size)
            print(f"{line}   on new slides {held_out:6.1%}   {seconds:3.0f} s", flush=True)
    return nnx.merge(graph, state["parameters"]), accuracy(graph, state["parameters"], test, batch_size)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="slide_classification", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", nargs="+", metavar="PATH", help="files of tile features (.h5, .npz), or folders")
    parser.add_argument("--labels", type=pathlib.Path, help="CSV file of slide names and labels")
    parser.add_argument("--weights", type=pathlib.Path, help="weights of Prov-GigaPath's slide encoder to start from")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, help="peak learning rate (3e-3, with --weights 2.5e-4)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/classification"), help="checkpoints")
    options = parser.parse_args(arguments)
    given = [x is not None for x in (options.tiles, options.labels, options.weights)]
    if any(given) and not all(given):
        parser.error("--tiles, --labels and --weights must be given together")
    if options.epochs < 1 or options.batch_size < 1:
        parser.error(f"--epochs and --batch-size must be at least 1, got {options.epochs} and {options.batch_size}")
    rate = options.learning_rate or (2.5e-4 if options.weights else 3e-3)
    try:
        if options.weights is None:
            encoder, classes = small_encoder(), ["no lesion", "lesion"]
            data, test = synthetic_dataset(320, seed=0), synthetic_dataset(160, seed=1)
        else:
            encoder = SlideEncoder.from_gigapath(read_weights(options.weights))
            data, classes = own_dataset(options.tiles, options.labels, encoder.config.input_features)
            data, test = split(data)
    except (SlideError, ValueError) as error:
        print(f"slide_classification: {error}", file=sys.stderr)
        return 2
    print(f"{len(data.labels)} slides to train with, {len(test.labels)} to test with, classes {', '.join(classes)}")
    model = Classifier(encoder, len(classes), rngs=nnx.Rngs(1))
    settings = {"epochs": options.epochs, "batch_size": options.batch_size, "learning_rate": rate}
    _, found = train(model, data, test, options.out, **settings)
    share = np.bincount(test.labels).max() / len(test.labels)
    print(f"{found:.1%} of the new slides are classified rightly; always the same answer gives {share:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
