"""What a caller may forget about padding and layouts is impossible through `Ring`, raises, or is reported."""

import dataclasses
import functools
import logging
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, error
from flax import nnx
from jax.sharding import AxisType

import ringjax as rj
from ringjax import linen
from ringjax.models import LongNetConfig, LongNetDecoder, LongNetEncoder, SlideEncoder, next_token_targets
from ringjax.nnx import DilatedSelfAttention

PATTERN = rj.DilationPattern((16, 64), (1, 4))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
LENGTH = 61  # 64 rows on rings of 4


def ring_of(size=4, kind="auto", **options):
    mesh = jax.make_mesh((size,), ("ring",), devices=jax.devices()[:size], axis_types=(KINDS[kind],))
    return rj.Ring(mesh, **options)


def arrays(length=LENGTH):
    return np.random.default_rng(0).normal(size=(3, 2, length, 4, 8)).astype(np.float32)


def attend(*arrays, ring=None, **options):
    call = functools.partial(rj.dilated_attention, pattern=PATTERN, ring=ring, implementation="xla", **options)
    return jax.jit(call, compiler_options=QUICK)(*arrays)


def says(text):
    return pytest.raises(ValueError, match=re.escape(text))


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(("layout", "kind"), [("contiguous", "auto"), ("zigzag", "explicit")])
def test_attention_ignores_the_padding_of_shard(layout, kind):
    ring = ring_of(kind=kind, layout=layout, seq_len=LENGTH)
    out = ring.unshard(attend(*map(ring.shard, arrays()), ring=ring))
    assert error(out, rj.reference_attention(*arrays(), PATTERN)) < 2e-6


def test_padding_of_a_ring_that_does_not_know_the_length_raises():
    for length, layout in ((61, "contiguous"), (60, "zigzag")):
        with says(f"or `seq_len` of the ring, got {length}: use `Ring(..., seq_len={length})`, also for the attention"):
            ring_of(layout=layout).shard(np.ones((2, length)))
    ids = ring_of().shard(np.zeros((2, LENGTH), np.int32), fill=-1)  # marks its padding
    assert np.asarray(ids).sum() == -2 * 3
    with says("or `seq_len` of the ring, got 61"):
        ring_of().shard(np.ones((2, LENGTH)), fill=-1)


def test_lengths_that_contradict_the_ring_raise():
    ring = ring_of(seq_len=LENGTH)
    stored, longer = ring.shard(arrays()[0]), ring_of().shard(arrays(128)[0])
    tokens, other = (np.zeros((1, length), np.int32) for length in (64, 128))
    calls = {
        "length of `x` must be `seq_len` of the ring, 61, got 64": lambda: ring.shard(np.ones((2, 64))),
        "length of arrays must be 64, at which a ring with `seq_len=61` stores sequences, got 128": lambda: attend(
            *[longer] * 3, ring=ring
        ),
        "`seq_len` must be None or that of the ring, 61, got 64": lambda: attend(*[stored] * 3, ring=ring, seq_len=64),
        "which a ring with `seq_len=61` stores sequences, got 128: use": lambda: ring.unshard(longer),
        "at which a ring with `seq_len=61` stores": lambda: next_token_targets(other, ring=ring),
        "must be None or that of the ring, 61, got 63": lambda: next_token_targets(tokens, seq_len=63, ring=ring),
        "`length` must be given for a ring without `seq_len`": ring_of().positions,
        "`seq_len` must be at least 1, got 0": lambda: ring_of(seq_len=0),
    }
    for text, call in calls.items():
        with says(text):
            call()


@pytest.mark.parametrize(
    "framework", ["nnx", pytest.param("linen", marks=pytest.mark.slow), pytest.param("model", marks=pytest.mark.slow)]
)
def test_layers_and_models_ignore_the_padding_of_shard(framework):
    def run(ring):
        if framework == "linen":
            layer = linen.DilatedSelfAttention(4, PATTERN, ring=ring)
            params = linen.DilatedSelfAttention(4, PATTERN).init(jax.random.key(0), x)
            call = functools.partial(layer.apply, params)
        elif framework == "model":
            config = LongNetConfig.tiny(vocab_size=8, num_layers=1, pattern=PATTERN)
            call = LongNetEncoder(config, ring=ring, rngs=nnx.Rngs(0))
        else:
            call = DilatedSelfAttention(4, 32, PATTERN, ring=ring, rngs=nnx.Rngs(0))
        given = (np.arange(2 * LENGTH, dtype=np.int32) % 8).reshape(2, -1) if framework == "model" else x
        call = jax.jit(call, compiler_options=QUICK)
        return call(given) if ring is None else ring.unshard(call(ring.shard(given)))

    x = np.random.default_rng(0).normal(size=(2, LENGTH, 32)).astype(np.float32)
    assert error(run(ring_of(layout="zigzag", seq_len=LENGTH)), run(None)) < 2e-6


@pytest.mark.slow
def test_decoder_on_a_ring_of_known_length_continues_its_prompt():
    config = LongNetConfig.tiny(vocab_size=8, num_layers=1, pattern=PATTERN)
    tokens = (np.arange(2 * LENGTH, dtype=np.int32) % 7).reshape(2, -1)
    found = []
    for ring in (None, ring_of(seq_len=LENGTH)):
        model = LongNetDecoder(config, ring=ring, rngs=nnx.Rngs(0))
        prefill = jax.jit(model.prefill, static_argnums=1, compiler_options=QUICK)
        caches = prefill(tokens if ring is None else ring.shard(tokens), 80)[1]
        assert caches[0].lengths.tolist() == [LENGTH] * 2
        found.append((model.extend(tokens[:, :1], caches)[0], model.generate(tokens[:, :9], 4, greedy=True)))
    assert error(found[1][0], found[0][0]) < 2e-5
    assert (found[1][1] == found[0][1]).all()


def test_slide_encoder_refuses_a_ring_of_known_length():
    config = LongNetConfig(input_features=6, features=8, num_heads=2, num_layers=1, pattern=PATTERN)
    with says("`ring` must not have a `seq_len`, as slides differ in length and are padded by the encoder, got 61."):
        SlideEncoder(config, ring=ring_of(seq_len=LENGTH), rngs=nnx.Rngs(0))


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "zigzag"),
        pytest.param(8, "zigzag", marks=pytest.mark.slow),
        pytest.param(4, "zigzag", marks=pytest.mark.slow),
    ],
)
def test_one_program_serves_every_layout_and_ring_size(size, layout):
    ring = ring_of(size, layout=layout, seq_len=LENGTH)
    ids = np.repeat(np.arange(3, dtype=np.int32), [20, 30, 11])[None].repeat(2, 0)
    options = {"ring": ring, "is_causal": True, "segment_ids": ring.shard(ids, fill=-1)}
    out = ring.unshard(attend(*map(ring.shard, arrays()), **options))
    assert error(out, rj.reference_attention(*arrays(), PATTERN, is_causal=True, segment_ids=ids)) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_in_sequence_order_raise_in_the_zigzag_layout(kind):
    ring = ring_of(kind=kind, layout="zigzag")
    text = "must be in the layout 'zigzag' of the ring and on its devices, got an array that is not on a mesh: use "
    for given in (arrays(64), [jnp.asarray(x) for x in arrays(64)]):
        for call in (attend, functools.partial(rj.dilated_attention, pattern=PATTERN)):
            with says(f"`query` {text}`ring.shard`."):
                call(*given, ring=ring)
    with says(f"`x` {text}`ring.shard`."):
        DilatedSelfAttention(4, 32, PATTERN, ring=ring, rngs=nnx.Rngs(0))(np.ones((1, 64, 32), np.float32))
    config = LongNetConfig.tiny(vocab_size=8, num_layers=1, pattern=PATTERN)
    with says(f"`tokens` {text}`ring.shard`."):
        LongNetDecoder(config, ring=ring, rngs=nnx.Rngs(0))(np.ones((1, 64), np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_sequence_order_raise_in_the_zigzag_layout(kind):
    ring = ring_of(kind=kind, layout="zigzag")
    stored = [ring.shard(x) for x in arrays(64)]
    call = attend if kind == "auto" else functools.partial(rj.dilated_attention, pattern=PATTERN)
    with says("`segment_ids` must be in the layout 'zigzag' of the ring and on its devices"):
        call(*stored, ring=ring, segment_ids=np.zeros((2, 64), np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_computed_from_the_positions_of_a_ring_are_in_its_layout(kind):
    ring = ring_of(kind=kind, layout="zigzag")

    def attend_to_the_first(count, *arrays):
        ids = jnp.where(ring.positions(64)[None] < count, 0, -1).repeat(2, 0)
        return rj.dilated_attention(*arrays, PATTERN, ring=ring, segment_ids=ids, implementation="xla")

    f = jax.jit(attend_to_the_first, compiler_options=QUICK)
    out = ring.unshard(f(jnp.asarray(50), *(ring.shard(x) for x in arrays(64))))
    wanted = rj.reference_attention(*arrays(64), PATTERN, seq_len=50)
    assert error(out, wanted) < 2e-6


def test_arrays_of_a_ring_of_another_size_raise():
    stored = [ring_of(2, layout="zigzag").shard(x) for x in arrays(64)]
    with says("`query` must be on the 4 devices of the ring's mesh, got an array of shape (2, 64, 4, 8) on"):
        rj.dilated_attention(*stored, PATTERN, ring=ring_of(4, layout="zigzag"))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_targets_of_a_ring_are_those_of_the_sequence(layout):
    ring = ring_of(layout=layout, seq_len=LENGTH)
    tokens = np.arange(100, 161, dtype=np.int32)[None]
    ids = np.repeat(np.arange(3, dtype=np.int32), [20, 30, 11])[None]
    for found, wanted in (
        (next_token_targets(ring.shard(tokens), ring=ring), next_token_targets(tokens)),
        (next_token_targets(ring.shard(tokens), ring.shard(ids, fill=-1), ring=ring), next_token_targets(tokens, ids)),
    ):
        chex.assert_trees_all_equal(tuple(map(ring.unshard, found)), wanted)
    whole, traced = dataclasses.replace(ring, seq_len=None), jax.jit(next_token_targets, static_argnames=("ring",))
    for x, wanted in zip(traced(ring.shard(tokens), ring=ring), next_token_targets(tokens), strict=True):
        np.testing.assert_array_equal(whole.unshard(x), np.pad(wanted, [(0, 0), (0, 3)]))  # padding has weight 0


# ----------------------------------------------------------------------------------------------------- run-time checks


@pytest.fixture
def debugged():
    return ring_of(layout="zigzag", debug=True)


@pytest.fixture
def warned(caplog):
    """Returns a function that returns the run-time warnings so far."""
    caplog.set_level(logging.WARNING)

    def texts():
        jax.effects_barrier()
        return [x.getMessage() for x in caplog.records if x.getMessage().startswith("ringjax")]

    return texts


def test_documents_that_are_not_laid_out_are_reported(debugged, warned):
    ids = np.repeat(np.arange(4, dtype=np.int32), 16)[None] + np.zeros((2, 1), np.int32)
    stored = [debugged.shard(x) for x in arrays(64)]
    attend(*stored, ring=debugged, segment_ids=debugged.shard(ids, fill=-1))
    assert not warned()
    attend(*stored, ring=debugged, segment_ids=dataclasses.replace(debugged, layout="contiguous").shard(ids))
    assert any("`segment_ids`: 2 values are not in the layout of the ring" in x for x in warned())


def test_positions_that_are_not_laid_out_are_reported(debugged, warned):
    options = {"is_causal": True, "positions": "rotary", "ring": debugged}
    layer = DilatedSelfAttention(2, 16, PATTERN, **options, rngs=nnx.Rngs(0))
    x = debugged.shard(np.ones((1, 64, 16), np.float32))
    layer(x, positions=debugged.positions(64))
    assert not warned()
    layer(x, positions=jnp.arange(64, dtype=jnp.int32))
    assert any("values are not in the layout of the ring (use `ring.positions`" in x for x in warned())
