"""A worker that runs Prov-GigaPath's slide encoder, written in PyTorch over its CPU flash attention operator.

It computes what the original package computes on a GPU, and is optimized as far as PyTorch allows: queries, keys and
values are projected into buffers that are padded once for all branches, rows are strided views of them, and a branch is
merged in place into the rows that it selects.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from serving import PeakMemory, apply_limits, serve
from slide_model import Slide
from torch.nn.functional import gelu, layer_norm, linear

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Branch:
    """The rows that a branch selects in a sequence: segments padded to a multiple of the rate."""

    def __init__(self, length: int, segment_length: int, rate: int):
        w = min(segment_length, length)
        self.rate, self.num = rate, -(-length // w)
        self.padded = -(-w // rate) * rate
        assert self.num == 1 or w == self.padded, "rows of several segments must be a multiple of the rate"

    @property
    def rows(self) -> int:
        return self.num * self.padded

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Views (rows, heads, ...) as the selected rows of each head, (segments, rate, heads / rate, rows, ...)."""
        _, heads, *rest = x.shape
        x = x[: self.rows].view(self.num, self.padded // self.rate, self.rate, self.rate, heads // self.rate, *rest)
        x = x.diagonal(dim1=2, dim2=3)
        return x.permute(0, x.ndim - 1, 2, 1, *range(3, x.ndim - 1))

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """Copies the selected rows of each head, (segments, heads, rows, ...)."""
        view = self.view(x)
        return view.reshape(self.num, -1, *view.shape[3:])


class Model:
    """The slide encoder for one slide."""

    def __init__(self, slide: Slide):
        self.slide = slide
        self.weights = {name: torch.from_numpy(x) for name, x in slide.weights().items()}

    def __call__(self, tiles: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        x = self.linear("patch_embed.proj", tiles) + self.positions(coordinates)
        x = torch.cat([self.weights["cls_token"][0], x])
        branches = zip(self.slide.segment_lengths, self.slide.dilation_rates, strict=True)
        self.branches = [Branch(len(x), w, r) for w, r in branches]
        for i in range(self.slide.layers):
            x = self.layer(f"encoder.layers.{i}.", x)
        x = self.norm("encoder.layer_norm", x[:1])
        return self.norm("norm", x, 1e-6)[0]

    def layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        attended = self.attention(f"{name}self_attn.", self.norm(f"{name}self_attn_layer_norm", x))
        attended = self.norm(f"{name}self_attn.inner_attn_ln", attended)
        x = x + self.linear(f"{name}self_attn.out_proj", attended)
        hidden = gelu(self.linear(f"{name}ffn.fc1", self.norm(f"{name}final_layer_norm", x)))
        return x + self.linear(f"{name}ffn.fc2", self.norm(f"{name}ffn.ffn_layernorm", hidden))

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        length, rows = len(x), max(branch.rows for branch in self.branches)
        qkv = []
        for short in "qkv":
            padded = torch.zeros(rows, self.slide.features)
            bias, weight = self.weights[f"{name}{short}_proj.bias"], self.weights[f"{name}{short}_proj.weight"]
            torch.addmm(bias, x, weight.T, out=padded[:length])
            qkv.append(padded.view(rows, self.slide.heads, -1))
        out, lse = torch.zeros_like(qkv[0]), torch.full(qkv[0].shape[:2], -torch.inf)
        for branch in self.branches:
            part, part_lse = flash(*(branch.select(x) for x in qkv), 0.0, False)
            out_view, lse_view = branch.view(out), branch.view(lse)
            part_lse = part_lse.view(lse_view.shape)
            total = torch.logaddexp(lse_view, part_lse)
            out_view.mul_(torch.exp(lse_view - total).unsqueeze(-1))
            out_view.add_(part.view(out_view.shape).mul_(torch.exp(part_lse - total).unsqueeze(-1)))
            lse_view.copy_(total)
        return out[:length].flatten(1)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], epsilon)

    def positions(self, coordinates: torch.Tensor) -> torch.Tensor:
        grid, quarter = torch.floor(coordinates / 256.0).double(), self.slide.features // 4
        angles = grid[..., None] * 10_000.0 ** (-torch.arange(quarter) / quarter).double()
        each = torch.cat([angles.sin(), angles.cos()], dim=-1).float()
        return torch.cat([each[:, 1], each[:, 0]], dim=-1)


def main() -> None:
    apply_limits()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state: dict = {}

    def run() -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        with torch.inference_mode():
            embedding = state["model"](*state["inputs"])
        return time.perf_counter() - start, embedding.numpy()

    def load(slide: dict) -> dict:
        found = Slide.from_dict(slide)
        state.update(model=Model(found), inputs=[torch.from_numpy(x) for x in found.inputs()])
        return {"versions": {"torch": torch.__version__}}

    def memory(path: str) -> dict:
        """Runs twice, and reports the growth of the process from the loaded weights on."""
        with PeakMemory() as peak:
            first, embedding = run()
            run()
        np.save(path, embedding)
        return {"first_s": first, "bytes": peak.bytes}

    serve({"load": load, "memory": memory, "run": lambda: {"seconds": run()[0]}})


if __name__ == "__main__":
    main()
