"""Every bad input is refused before anything is compiled, by a message that names the argument and shows the value."""

import collections
import re

import jax
import numpy as np
import pytest
from bad_inputs import ROWS, Row, rngs

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
    elif isinstance(value, int) and abs(value) > 10**1000:
        shown |= {f"{value.bit_length()} bits", f"{value.bit_length()}-bit"}
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


def test_the_table_is_long_and_covers_the_public_functions():
    assert len(ROWS) >= 300
    assert len(FUNCTIONS) >= 30
    assert min(collections.Counter(row.function for row in ROWS).values()) >= 3
