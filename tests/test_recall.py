"""The recall example in small: what is asked, who can know it, and that a model learns it."""

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj

SMALL = {"distance": 64, "copies": 2, "places": 32}


@pytest.fixture(scope="module")
def recall():
    path = pathlib.Path(__file__).parent.parent / "examples" / "recall.py"
    spec = importlib.util.spec_from_file_location("recall_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def small(recall):
    """A task, and sequences of it."""
    task = recall.Task(**SMALL)
    return task, np.asarray(jax.jit(task.sequences, static_argnums=1)(jax.random.key(0), 32))


@functools.partial(jax.jit, static_argnames=("pattern", "length"))
def read(pattern, length):
    """Share of each position (column) in what a position (row) reads where all scores are equal, by the oracle."""
    nothing = jnp.zeros((1, length, 8, length))
    marks = jnp.broadcast_to(jnp.eye(length)[None, :, None], nothing.shape)
    return rj.reference_attention(nothing, nothing, marks, pattern, is_causal=True)[0].mean(1)


def sources(pattern, length, layers):
    """Which positions (column) a position (row) can know of after this many layers."""
    sees = (np.asarray(read(pattern, length)) > 0) | np.eye(length, dtype=bool)  # each layer adds to its input
    return np.linalg.matrix_power(sees.astype(float), layers) > 0


def test_the_answer_stands_exactly_so_far_back_and_nowhere_nearer(recall, small):
    task, tokens = small
    assert tokens.shape == (32, task.length)
    starts = set()
    for row in tokens:
        (asked,), (letters,) = np.nonzero(row == recall.QUESTION), np.nonzero(row < recall.LETTERS)
        assert len(asked) == recall.RATE and len(letters) == recall.RATE * task.copies
        assert (asked == letters[-recall.RATE :] + task.distance).all()
        assert (row[letters].reshape(task.copies, -1) == row[letters[-recall.RATE :]]).all()
        starts.add(asked[0])
    assert len(starts) > 8  # it moves


@pytest.mark.parametrize("reaches", [True, False])
def test_only_the_long_segment_can_know(recall, small, reaches):
    task, tokens = small
    reach = sources(task.pattern(reaches=reaches), task.length, layers=2)
    for row in tokens:
        known = reach[row == recall.QUESTION][:, row < recall.LETTERS]
        assert known.any(1).all() if reaches else not known.any()


def test_a_model_that_reaches_recalls(recall, small):
    task, _ = small
    whole = task.pattern(reaches=True)
    pattern = rj.DilationPattern(
        whole.segment_lengths[1:], whole.dilation_rates[1:]
    )  # the long branch: compiles sooner
    with jax.numpy_dtype_promotion("standard"):  # as optax needs
        _, history = recall.train(task, pattern, steps=60, batch=8, chunk=10)
    assert history[0] < 0.2 and history[-1] > 0.95


@pytest.mark.slow
def test_reach_makes_the_difference(recall):
    task = recall.Task(distance=256, copies=4)
    with jax.numpy_dtype_promotion("standard"):
        far, near = (
            recall.accuracy_of(recall.train(task, task.pattern(reaches=reaches), steps=160, batch=8)[0], task)
            for reaches in (True, False)
        )
    assert far > 0.95
    assert recall.is_chance(near, 128 * recall.RATE)
    assert not recall.is_chance(2 * recall.CHANCE, 128 * recall.RATE)
