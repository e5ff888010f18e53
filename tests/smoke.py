"""The installed package, outside its source tree: `make package` runs this in an empty folder, with the wheel alone.

Not collected by pytest, whose other tests run from the source tree.
"""

import functools
import importlib
import importlib.metadata
import importlib.resources
import json
import pathlib
import pkgutil
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ringjax as rj
from ringjax._src.kernels.cpu import build
from ringjax.models import LongNetConfig, LongNetDecoder, next_token_targets, token_loss

PATTERN = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))


def every_module() -> list[str]:
    """Imports all modules, which the dependencies without extras must allow."""
    names = [module.name for module in pkgutil.walk_packages(rj.__path__, "ringjax.")]
    for name in names:
        if not name.endswith("__main__"):  # that one runs the command
            importlib.import_module(name)
    return names


def attention() -> None:
    """One device and a ring of two, with their gradients, against the oracle."""
    arrays = tuple(jax.random.normal(jax.random.key(0), (4, 1, 64, 4, 8)))  # query, key, value, cotangent
    mesh = jax.make_mesh((2,), ("ring",))
    ring = rj.Ring(mesh, layout="zigzag")
    sharding = jax.NamedSharding(mesh, ring.spec())
    stored = [jax.device_put(rj.to_layout(x, "zigzag", 2), sharding) for x in arrays]

    expected = out_and_gradients(rj.reference_attention, *arrays)
    one = out_and_gradients(rj.dilated_attention, *arrays)
    two = out_and_gradients(functools.partial(rj.dilated_attention, ring=ring), *stored)
    for name, found in {"one device": one, "a ring of 2": [rj.from_layout(x, "zigzag", 2) for x in two]}.items():
        for ours, theirs in zip(found, expected, strict=True):
            error = np.max(np.abs(np.asarray(ours) - theirs)) / max(1.0, np.max(np.abs(theirs)))
            assert error <= 2e-6, f"{name}: error {error:.1e}"


def out_and_gradients(attend: Callable[..., jax.Array], *arrays: jax.Array) -> list[jax.Array]:
    *qkv, cotangent = arrays
    out, pull = jax.vjp(jax.jit(lambda q, k, v: attend(q, k, v, PATTERN, is_causal=True)), *qkv)
    return [out, *pull(cotangent)]


def model() -> None:
    """Checks that steps of gradient descent lower the loss of a tiny decoder."""
    decoder = LongNetDecoder(LongNetConfig.tiny(vocab_size=16, pattern=PATTERN), rngs=nnx.Rngs(0))
    tokens = jnp.arange(64)[None] % 7

    @nnx.jit
    def step(decoder):
        def loss_of(decoder):
            total, count = token_loss(decoder(tokens), *next_token_targets(tokens))
            return total / count

        loss, gradient = nnx.value_and_grad(loss_of)(decoder)
        parameters = nnx.state(decoder, nnx.Param)
        nnx.update(decoder, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient))
        return loss

    losses = [float(step(decoder)) for _ in range(5)]
    assert losses[-1] < losses[0], losses


def command() -> None:
    """The command is installed and answers."""
    script = pathlib.Path(sysconfig.get_path("scripts")) / "ringjax"
    words = shlex.split("plan --seq-len 4K --heads 4 --head-dim 16 --pattern 1K/1,T/4 --ring 2 --causal --json")
    for start in ([str(script)], [sys.executable, "-m", "ringjax"]):
        answer = subprocess.run([*start, *words], check=True, capture_output=True, text=True, timeout=120)
        told = json.loads(answer.stdout)
        assert told["ringjax"] == rj.__version__ and told["plan"]["ring_size"] == 2, told


def kernels() -> None:
    """The wheel has the sources of the kernels on CPU, and a machine with a compiler compiles them."""
    reason = build.why_not()
    assert bool(reason) == (shutil.which("c++") is None), reason


def main() -> None:
    home = pathlib.Path(rj.__file__).parent
    assert home.parent == pathlib.Path(sysconfig.get_path("purelib")), f"ringjax comes from {home}, not from the wheel"
    assert importlib.resources.files("ringjax").joinpath("py.typed").is_file()
    assert importlib.metadata.version("ringjax") == rj.__version__
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    names = every_module()
    kernels()
    attention()
    model()
    command()
    versions = ", ".join(f"{package.__name__} {package.__version__}" for package in (rj, jax, flax))
    print(f"{versions}, Python {platform.python_version()}, {len(names)} modules")
    print("ok")


if __name__ == "__main__":
    main()
