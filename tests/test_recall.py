"""The recall example at a small size: its task, which patterns can solve it, and a model that learns it."""

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
    sys.modules[spec.name] = module  # dataclasses look up their types here
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def small(recall):
    """Returns a task and sequences drawn from it."""
    task = recall.Task(**SMALL)
    return task, np.asarray(jax.jit(task.sequences, static_argnums=1)(jax.random.key(0), 32))


@functools.partial(jax.jit, static_argnames=("pattern", "length"))
def attention_weights(pattern, length):
    """Returns the weight of each key position (column) for each query (row) of the oracle if all scores are equal."""
    zeros = jnp.zeros((1, length, 8, length))
    unit_vectors = jnp.broadcast_to(jnp.eye(length)[None, :, None], zeros.shape)
    return rj.reference_attention(zeros, zeros, unit_vectors, pattern, is_causal=True)[0].mean(1)


def reachable(pattern, length, num_layers):
    """Returns the positions (columns) that influence each position (row) after this many layers."""
    one_layer = (np.asarray(attention_weights(pattern, length)) > 0) | np.eye(length, dtype=bool)  # residual connection
    return np.linalg.matrix_power(one_layer.astype(float), num_layers) > 0


def test_the_answer_is_exactly_the_given_distance_back_and_no_nearer(recall, small):
    task, tokens = small
    assert tokens.shape == (32, task.length)
    starts = set()
    for row in tokens:
        (asked,), (letters,) = np.nonzero(row == recall.QUESTION), np.nonzero(row < recall.LETTERS)
        assert len(asked) == recall.RATE and len(letters) == recall.RATE * task.copies
        assert (asked == letters[-recall.RATE :] + task.distance).all()
        assert (row[letters].reshape(task.copies, -1) == row[letters[-recall.RATE :]]).all()
        starts.add(asked[0])
    assert len(starts) > 8  # the question moves


@pytest.mark.parametrize("reaches", [True, False])
def test_only_the_long_segment_reaches_the_answer(recall, small, reaches):
    task, tokens = small
    reach = reachable(task.pattern(reaches=reaches), task.length, num_layers=2)
    for row in tokens:
        connected = reach[row == recall.QUESTION][:, row < recall.LETTERS]
        assert connected.any(1).all() if reaches else not connected.any()


@pytest.mark.slow
def test_a_model_that_reaches_the_answer_learns_it(recall, small):
    task, _ = small
    whole = task.pattern(reaches=True)
    # only the long branch, which compiles faster
    pattern = rj.DilationPattern(whole.segment_lengths[1:], whole.dilation_rates[1:])
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        _, history = recall.train(task, pattern, steps=60, batch=8, chunk=10)
    assert history[0] < 0.2 and history[-1] > 0.95


@pytest.mark.slow
def test_only_a_model_that_reaches_the_answer_beats_chance(recall):
    task = recall.Task(distance=256, copies=4)
    with jax.numpy_dtype_promotion("standard"):
        far, near = (
            recall.accuracy_of(recall.train(task, task.pattern(reaches=reaches), steps=160, batch=8)[0], task)
            for reaches in (True, False)
        )
    assert far > 0.95
    assert recall.is_chance(near, 128 * recall.RATE)
    assert not recall.is_chance(2 * recall.CHANCE, 128 * recall.RATE)
