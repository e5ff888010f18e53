"""Memory and size of the compiled program."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, QUICK, available, slow_unless

import ringjax as rj

PATTERN = rj.DilationPattern((512, 2048, 8192), (1, 4, 16))
BOTH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def lowered_gradient(*, length, is_causal, implementation, pattern=PATTERN):
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    attention = functools.partial(
        rj.dilated_attention, pattern=pattern, is_causal=is_causal, implementation=implementation
    )
    f = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).sum(), argnums=(0, 1, 2)))
    return f.lower(x, x, x), 3 * math.prod(x.shape) * 4


def compiled_gradient(**options):
    lowered, inputs = lowered_gradient(**options)
    return lowered.compile(QUICK), inputs


def temporaries(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@BOTH
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradient_memory_is_linear_and_small(is_causal, implementation):
    small, _ = compiled_gradient(length=8192, is_causal=is_causal, implementation=implementation)
    large, inputs = compiled_gradient(length=32768, is_causal=is_causal, implementation=implementation)
    assert temporaries(large) <= 2.5 * inputs
    assert math.log(temporaries(large) / temporaries(small)) / math.log(4) <= 1.05


UNEVEN = {
    "length": (16385, PATTERN),
    "rates": (32768, rj.DilationPattern.longnet()),
    "rate beyond segment": (4096, rj.DilationPattern((16,), (1 << 40,))),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, implementation, marks=slow_unless(implementation == available(default)))
        for name, default in {"length": "xla", "rates": "native", "rate beyond segment": "xla"}.items()
        for implementation in IMPLEMENTATIONS
    ],
)
def test_gradient_memory_is_small_when_nothing_divides_evenly(name, implementation):
    length, pattern = UNEVEN[name]
    compiled, inputs = compiled_gradient(length=length, is_causal=False, implementation=implementation, pattern=pattern)
    assert temporaries(compiled) <= 2.5 * inputs


@BOTH
@pytest.mark.parametrize("stage", [lowered_gradient, pytest.param(compiled_gradient, marks=pytest.mark.slow)])
def test_program_size_does_not_grow_with_the_length(stage, implementation):
    pattern = rj.DilationPattern.geometric(2048, 32768, 16)
    options = {"is_causal": True, "implementation": implementation, "pattern": pattern}
    sizes = [len(stage(length=length, **options)[0].as_text()) for length in (65536, 1048576)]
    assert max(sizes) <= 1.2 * min(sizes)


@BOTH
def test_no_constant_grows_with_the_length(implementation):
    x = jax.ShapeDtypeStruct((1, 1048576, 2, 8), jnp.float32)
    pattern = rj.DilationPattern((3000, 1048576), (7, 16))  # r does not divide w, w does not divide T
    attention = functools.partial(rj.dilated_attention, pattern=pattern, implementation=implementation)
    closed = jax.make_jaxpr(lambda q: attention(q, q, q))(x)
    assert max((np.size(c) for c in jax.tree.leaves(closed.consts)), default=0) < 100
    assert len(jax.jit(lambda q: attention(q, q, q)).lower(x).as_text()) < 400_000


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_memory_is_linear_and_small_at_full_size(is_causal, implementation):
    pattern = rj.DilationPattern((2048, 8192, 32768), (1, 4, 8))
    options = {"is_causal": is_causal, "implementation": implementation, "pattern": pattern}
    (small, _), (large, inputs) = (compiled_gradient(length=length, **options) for length in (16384, 65536))
    assert temporaries(large) <= 2.5 * inputs
    assert math.log(temporaries(large) / temporaries(small)) / math.log(4) <= 1.05
