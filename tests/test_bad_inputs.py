"""Every bad input is refused before anything is compiled, by a message that names the argument and shows the value."""

import collections
import re

import jax
import numpy as np
import pytest
from bad_inputs import ROWS, Row
from bad_inputs_flax import rngs
from cases import ring_mesh

import ringjax as rj

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


def forms(value) -> set[str]:
    """What a message may show of a value: the value, its type, its shape or dtype, or one of its entries."""
    shown = {type(value).__name__, getattr(value, "__name__", "")}
    if hasattr(value, "dtype") and not isinstance(value, type):
        shown |= {str(value.shape), str(value.dtype), *(str(size) for size in value.shape), repr(value)}
        shown |= {str(x) for x in np.asarray(value).ravel()[[0, -1]]} if np.size(value) and _is_array(value) else set()
        shown |= {str(np.asarray(value).tolist()), *map(repr, value)} if np.ndim(value) and _is_array(value) else set()
    elif isinstance(value, list | tuple | set | frozenset | dict):
        shown |= {str(len(value)), repr(value), *(repr(x) for x in value), *(type(x).__name__ for x in value)}
    elif hasattr(value, "pattern"):
        shown.add(repr(value.pattern))
    elif isinstance(value, int) and value.bit_length() > 14_000:
        shown.add(f"{value.bit_length()} bits")
    elif isinstance(value, int):
        shown.add(str(value)[:200])
    else:
        shown |= {repr(value), str(value)}
    return shown - {""}


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array)


def problem(row: Row) -> str:
    """What is wrong with how a row is refused, or ""."""
    value, call = row.run()
    before = len(COMPILED)
    try:
        call()
    except (ValueError, NotImplementedError) as caught:
        text = str(caught)
    except Exception as caught:
        return f"{type(caught).__name__}: {str(caught)[:150]}"
    else:
        return "accepted"
    if len(COMPILED) > before:
        return "compiled something"
    if not re.search(rf"`{row.named}\b", text) or "\n" in text or len(text) > 600:
        return f"does not name the argument in one line: {text[:200]}"
    rest = text.partition("got ")[2] or text.partition(f"`{row.named}=")[2]  # or the backend that cannot
    if not any(form in rest for form in (forms(value) if row.named == row.argument else {""})):
        return f"does not show the value {value!r}: {text[:200]}"
    return ""


@pytest.fixture(scope="module", autouse=True)
def _made_before():
    rngs()


FUNCTIONS = list(dict.fromkeys(row.function for row in ROWS))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_inputs_are_refused_by_a_clear_message(function):
    found = {}
    for number, row in enumerate(row for row in ROWS if row.function == function):
        if fault := problem(row):
            found[f"{row.argument} #{number} {str(row.value)[:60]}"] = fault
    assert not found, "\n" + "\n".join(f"{name}: {fault}" for name, fault in found.items())


def shape_of(batch, length, **keywords):
    x = jax.ShapeDtypeStruct((batch, length, 2, 4), np.float32)
    return jax.eval_shape(lambda x: rj.dilated_attention(x, x, x, LONG_PATTERN, **keywords), x).shape


LONG_PATTERN = rj.DilationPattern((1024, 2**53), (1, 2**20))
UNUSUAL = {
    "seq_len": np.int64(5),
    "scale": np.float32(-2),
    "segment_ids": np.full((1, 8), 2**31 - 1),
    "dropout_rng": np.zeros(2, np.uint32),
}
# unusual inputs that have a meaning: what they give
DEFINED = {
    "segments are clamped to the length": (lambda: LONG_PATTERN.branches(2, 8)[1].segment_length, 8),
    "segments from a generator": (lambda: rj.DilationPattern(iter([4]), range(1, 2)).dilation_rates, (1,)),
    "numpy integers": (lambda: rj.DilationPattern(np.array([4]), [np.int8(1)]).segment_lengths, (4,)),
    "a rate beyond the segment": (lambda: rj.DilationPattern((4,), (9,)).branches(6)[0].rows(4), [1, 1, 1, 1, 0, 0]),
    "the longest max_len": (lambda: rj.DilationPattern.for_length(2**53).segment_lengths[-1], 2**53),
    "the shortest max_len": (lambda: rj.DilationPattern.for_length(1).segment_lengths, (1,)),
    "one geometric segment": (lambda: rj.DilationPattern.geometric(4, 4, 2).segment_lengths, (4,)),
    "coverage of a long sequence": (lambda: rj.DilationPattern((8, 16), (2, 4)).coverage(4, seq_len=2**53).share, 0.5),
    "a billion tokens": (lambda: shape_of(2, 10**9), (2, 10**9, 2, 4)),
    "the plan of more tokens than programs take": (
        lambda: rj.plan(LONG_PATTERN, seq_len=2**50, num_heads=4, head_dim=8, ring_size=2**10, batch=10**6).spec.batch,
        10**6,
    ),
    "numbers of numpy, ids of 64 bits that fit and a key that is not used": (
        lambda: shape_of(1, 8, **UNUSUAL),
        (1, 8, 2, 4),
    ),
    "a forward size for 0": (lambda: rj.BlockSizes(32, 16, grad_query=0).grad_query, 32),
}


@pytest.mark.parametrize("name", DEFINED)
def test_unusual_inputs_give_what_is_documented(name):
    call, result = DEFINED[name]
    assert call() == result


@pytest.mark.slow
def test_a_billion_tokens_of_8_sequences_trace_on_4_devices():
    assert shape_of(8, 10**9, ring=rj.Ring(ring_mesh(4)), implementation="xla") == (8, 10**9, 2, 4)
    with pytest.raises(ValueError, match=r"`query` must have at most 2147483647 positions .*got 8 times 500000000"):
        shape_of(8, 10**9, ring=rj.Ring(ring_mesh(2)))


def test_the_table_is_long_and_covers_the_public_functions():
    assert len(ROWS) >= 300
    assert len(FUNCTIONS) >= 30
    assert min(collections.Counter(row.function for row in ROWS).values()) >= 3
