"""Decoding with a LongNet: prompts, next tokens and generated tokens equal the whole sequence."""

import functools

import chex
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


def decoder(config, ring=None, max_traces=0):
    """Returns parameters and three compiled functions: the whole sequence, prefill, and extend."""
    model, shapes = functional(LongNetDecoder, config, ring)

    @chex.assert_max_traces(n=max_traces)
    def extend(p, tokens, caches, counts):
        return model(p).extend(tokens, caches, counts)

    whole = COMPILE(lambda p, tokens: model(p)(tokens))
    prefill = COMPILE(lambda p, tokens, lengths: model(p).prefill(tokens, LENGTH + 4, lengths=lengths))
    return drawn(shapes), whole, prefill, COMPILE(extend)


def assert_decodes(config, *, prompt_length, lengths, chunks, ring=None):
    """Prefills prompts of these lengths, then appends chunks of tokens with a count per entry."""
    parameters, whole, *_ = decoder(config)
    expected = np.asarray(whole(parameters, TOKENS))
    widths = {max(counts) for counts in chunks}
    parameters, _, prefill, extend = decoder(config, ring, max_traces=len(widths))
    at, prompt = np.array(lengths), TOKENS[:, :prompt_length]
    prompt = prompt if ring is None else stored(ring, prompt)
    logits, caches = prefill(parameters, prompt, at)
    if ring is not None:
        logits = rj.from_layout(np.asarray(logits), ring.layout, ring.size("axis_name"))
    for b, length in enumerate(lengths):
        assert error(logits[b, :length], expected[b, :length]) <= 2e-5
    for counts in chunks:
        width = max(counts)
        index = np.minimum(at[:, None] + np.arange(width), LENGTH - 1)
        logits, caches = extend(parameters, np.take_along_axis(TOKENS, index, 1), caches, np.array(counts))
        for b, count in ((b, count) for b, count in enumerate(counts) if count):
            assert error(logits[b, :count], expected[b, at[b] : at[b] + count]) <= 2e-5, (b, at, count)
        at = at + counts
    assert len(caches) == LAYERS and caches[0].lengths.tolist() == at.tolist()


def test_decoding_equals_the_whole_sequence():
    config = config_of(pattern=TWO_BRANCHES)
    chunks = [(1, 1)] * 8 + [(0, 1)] * 5 + [(1, 1)] * 14
    assert_decodes(config, prompt_length=24, lengths=(21, 13), chunks=chunks)


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
def test_decoding_of_every_kind_of_model_equals_the_whole_sequence(changes, ring_size):
    ring = None if ring_size == 1 else rj.Ring(ring_mesh(ring_size), layout="zigzag")
    chunks = [(5, 3), (1, 1), (5, 5), (1, 0), (5, 1), (1, 1)]
    config = config_of(**{"pattern": TWO_BRANCHES, **changes})
    assert_decodes(config, prompt_length=20, lengths=(20, 7), chunks=chunks, ring=ring)


@SLOW
@pytest.mark.parametrize(
    ("sizes", "kind"), [(ALL_AXES, AxisType.Auto), (ALL_AXES, AxisType.Explicit), ({"ring": 4}, AxisType.Explicit)]
)
def test_generation_on_a_ring_equals_one_device(sizes, kind):
    model, shapes = functional(LongNetDecoder, config_of(pattern=TWO_BRANCHES))
    expected = model(drawn(shapes)).generate(TOKENS[:, :10], 6, lengths=np.array([10, 7]), greedy=True)
    axes = {"batch_axis": "data", "head_axis": "tensor"} if "data" in sizes else {}
    ring = rj.Ring(mesh_of(sizes, kind), layout="zigzag", **axes)
    on_ring, _ = functional(LongNetDecoder, config_of(pattern=TWO_BRANCHES), ring)
    with jax.set_mesh(ring.mesh):
        got = on_ring(placed(drawn(shapes), ring)).generate(TOKENS[:, :10], 6, lengths=np.array([10, 7]), greedy=True)
    assert np.array_equal(got, expected)


@SLOW
def test_greedy_generation_takes_the_likeliest_token_and_traces_one_step(monkeypatch):
    model, shapes = functional(LongNetDecoder, config_of())
    parameters = drawn(shapes)
    monkeypatch.setattr(LongNetDecoder, "extend", chex.assert_max_traces(LongNetDecoder.extend, n=1))
    prompt, lengths = TOKENS[:, :9], np.array([9, 5])
    generated = COMPILE(lambda p, x: model(p).generate(x, 4, lengths=lengths, greedy=True))(parameters, prompt)
    logits = np.asarray(COMPILE(lambda p, x: model(p)(x))(parameters, _joined(prompt, lengths, np.asarray(generated))))
    for b, length in enumerate(lengths):
        assert (logits[b, length - 1 : length + 3].argmax(-1) == generated[b]).all()


def _joined(prompt, lengths, generated):
    tokens = np.zeros((len(prompt), prompt.shape[1] + generated.shape[1]), prompt.dtype)
    for b, length in enumerate(lengths):
        tokens[b, : length + generated.shape[1]] = [*prompt[b, :length], *generated[b]]
    return tokens


@SLOW
def test_sampling_depends_on_key_and_temperature_and_does_not_retrace(monkeypatch):
    model, shapes = functional(LongNetDecoder, config_of())
    # one trace for a temperature that is an array, one for a number, and one for the greedy choice
    monkeypatch.setattr(LongNetDecoder, "extend", chex.assert_max_traces(LongNetDecoder.extend, n=3))
    model, prompt = model(drawn(shapes)), TOKENS[:, :9]
    draw = functools.partial(model.generate, prompt, 12, top_k=3)
    first = draw(rng=jax.random.key(0), temperature=jnp.float32(2.0))
    assert np.array_equal(first, draw(rng=jax.random.key(0), temperature=2.0))
    assert not np.array_equal(first, draw(rng=jax.random.key(1), temperature=2.0))
    cold = draw(rng=jax.random.key(0), temperature=jnp.float32(1e-6))
    assert np.array_equal(cold, model.generate(prompt, 12, greedy=True))
