"""Decoding through a LongNet: prompts, next tokens and generated text equal the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import error, ring_mesh
from jax.sharding import AxisType
from test_models import (
    ALL_AXES,
    COMPILE,
    LAYERS,
    LENGTH,
    SLOW,
    TOKENS,
    TWO_BRANCHES,
    config_of,
    drawn,
    functional,
    mesh_of,
    placed,
    stored,
)

import ringjax as rj
from ringjax.models import LongNetDecoder


def decoder(config, ring=None):
    """Parameters, and compiled: the whole sequence, prefill, and extend, which counts its traces."""
    model, shapes = functional(LongNetDecoder, config, ring)
    traces = []

    def extend(p, tokens, caches, counts):
        traces.append(tokens.shape)
        return model(p).extend(tokens, caches, counts)

    whole = COMPILE(lambda p, tokens: model(p)(tokens))
    prefill = COMPILE(lambda p, tokens, lengths: model(p).prefill(tokens, LENGTH + 4, lengths=lengths))
    return drawn(shapes), whole, prefill, COMPILE(extend), traces


def assert_decodes(config, prompt_length, lengths, chunks, ring=None):
    """A prefill of prompts of these lengths, then chunks of tokens, of which each entry has its own count."""
    parameters, whole, *_ = decoder(config)
    right = np.asarray(whole(parameters, TOKENS))
    parameters, _, prefill, extend, traces = decoder(config, ring)
    at, prompt = np.array(lengths), TOKENS[:, :prompt_length]
    prompt = prompt if ring is None else stored(ring, prompt)
    logits, caches = prefill(parameters, prompt, at)
    if ring is not None:
        logits = rj.from_layout(np.asarray(logits), ring.layout, ring.size("axis_name"))
    for b, length in enumerate(lengths):
        assert error(logits[b, :length], right[b, :length]) <= 2e-5
    for counts in chunks:
        width = max(counts)
        index = np.minimum(at[:, None] + np.arange(width), LENGTH - 1)
        logits, caches = extend(parameters, np.take_along_axis(TOKENS, index, 1), caches, np.array(counts))
        for b, count in ((b, count) for b, count in enumerate(counts) if count):
            assert error(logits[b, :count], right[b, at[b] : at[b] + count]) <= 2e-5, (b, at, count)
        at = at + counts
    assert len(caches) == LAYERS and caches[0].lengths.tolist() == at.tolist()
    assert len(traces) == len({max(counts) for counts in chunks})


def test_decoding_equals_the_whole_sequence():
    config = config_of(pattern=TWO_BRANCHES)
    assert_decodes(config, 24, (21, 13), [(1, 1)] * 8 + [(0, 1)] * 5 + [(1, 1)] * 14)


@SLOW
@pytest.mark.parametrize(
    ("changes", "ring_size"),
    [
        ({"positions": "xpos", "sub_norm": False}, 1),
        ({"positions": None, "num_kv_heads": 1, "scan_layers": False}, 1),
        ({"pattern": rj.DilationPattern((8, 40), (1, 3), offsets="block", mixing="detached")}, 2),
        ({"pattern": TWO_BRANCHES, "positions": "xpos"}, 2),
    ],
)
def test_decoding_of_many_kinds(changes, ring_size):
    ring = None if ring_size == 1 else rj.Ring(ring_mesh(ring_size), layout="zigzag")
    chunks = [(5, 3), (1, 1), (5, 5), (1, 0), (5, 1), (1, 1)]
    assert_decodes(config_of(**{"pattern": TWO_BRANCHES, **changes}), 20, (20, 7), chunks, ring)


@SLOW
@pytest.mark.parametrize(
    ("sizes", "kind"), [(ALL_AXES, AxisType.Auto), (ALL_AXES, AxisType.Explicit), ({"ring": 4}, AxisType.Explicit)]
)
def test_generating_on_a_ring(sizes, kind):
    model, shapes = functional(LongNetDecoder, config_of(pattern=TWO_BRANCHES))
    right = model(drawn(shapes)).generate(TOKENS[:, :10], 6, lengths=np.array([10, 7]), greedy=True)
    axes = {"batch_axis": "data", "head_axis": "tensor"} if "data" in sizes else {}
    ring = rj.Ring(mesh_of(sizes, kind), layout="zigzag", **axes)
    on_ring, _ = functional(LongNetDecoder, config_of(pattern=TWO_BRANCHES), ring)
    with jax.set_mesh(ring.mesh):
        got = on_ring(placed(drawn(shapes), ring)).generate(TOKENS[:, :10], 6, lengths=np.array([10, 7]), greedy=True)
    assert np.array_equal(got, right)


@SLOW
def test_generate_takes_the_likeliest_token_in_one_program(monkeypatch):
    model, shapes = functional(LongNetDecoder, config_of())
    parameters, traces, extend = drawn(shapes), [], LongNetDecoder.extend
    monkeypatch.setattr(LongNetDecoder, "extend", lambda *a: traces.append(1) or extend(*a))
    prompt, lengths = TOKENS[:, :9], np.array([9, 5])
    made = COMPILE(lambda p, x: model(p).generate(x, 4, lengths=lengths, greedy=True))(parameters, prompt)
    assert len(traces) == 1
    logits = np.asarray(COMPILE(lambda p, x: model(p)(x))(parameters, _joined(prompt, lengths, np.asarray(made))))
    for b, length in enumerate(lengths):
        assert (logits[b, length - 1 : length + 3].argmax(-1) == made[b]).all()


def _joined(prompt, lengths, made):
    tokens = np.zeros((len(prompt), prompt.shape[1] + made.shape[1]), prompt.dtype)
    for b, length in enumerate(lengths):
        tokens[b, : length + made.shape[1]] = [*prompt[b, :length], *made[b]]
    return tokens


@SLOW
def test_generate_draws_and_compiles_once(monkeypatch):
    model, shapes = functional(LongNetDecoder, config_of())
    traces, extend = [], LongNetDecoder.extend
    monkeypatch.setattr(LongNetDecoder, "extend", lambda *a: traces.append(1) or extend(*a))
    model, prompt = model(drawn(shapes)), TOKENS[:, :9]
    draw = functools.partial(model.generate, prompt, 12, top_k=3)
    first = draw(rng=jax.random.key(0), temperature=jnp.float32(2.0))
    assert np.array_equal(first, draw(rng=jax.random.key(0), temperature=2.0))
    assert not np.array_equal(first, draw(rng=jax.random.key(1), temperature=2.0))
    cold = draw(rng=jax.random.key(0), temperature=jnp.float32(1e-6))
    assert len(traces) == 2  # with a temperature that is an array, and with one that is a number
    assert np.array_equal(cold, model.generate(prompt, 12, greedy=True))
