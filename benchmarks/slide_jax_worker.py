"""A worker that runs ringjax's slide encoder."""

from __future__ import annotations

import time

import jax
import numpy as np
from serving import PeakMemory, apply_limits, serve
from slide_model import Slide

import ringjax as rj
from ringjax.models import SlideEncoder


def main() -> None:
    apply_limits()
    jax.config.update("jax_platforms", "cpu")
    state: dict = {}

    def run() -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        tiles, coordinates = state["inputs"]
        embedding = np.asarray(state["encoder"](tiles[None], coordinates[None])[0])
        return time.perf_counter() - start, embedding

    def load(slide: dict, dtype: str) -> dict:
        found = Slide.from_dict(slide)
        pattern = rj.DilationPattern(
            found.segment_lengths, found.dilation_rates, offsets="block", mixing="detached", padding="zeros"
        )
        encoder = SlideEncoder.from_gigapath(found.weights(), dtype=dtype, num_heads=found.heads, pattern=pattern)
        state.update(encoder=encoder, inputs=found.inputs())
        return {"versions": {"jax": jax.__version__, "ringjax": rj.__version__}}

    def memory(path: str) -> dict:
        """Runs twice, and reports the growth of the process from the loaded weights on, compilation included."""
        with PeakMemory() as peak:
            first, embedding = run()
            run()
        np.save(path, embedding)
        return {"first_s": first, "bytes": peak.bytes}

    def temporaries() -> dict:
        """Reports the temporary memory of the compiled program."""
        tiles, coordinates = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in state["inputs"])
        encode = jax.jit(lambda encoder, *inputs: encoder(*inputs))
        compiled = encode.lower(state["encoder"], tiles, coordinates).compile()
        return {"bytes": compiled.memory_analysis().temp_size_in_bytes}

    serve({"load": load, "memory": memory, "temporaries": temporaries, "run": lambda: {"seconds": run()[0]}})


if __name__ == "__main__":
    main()
