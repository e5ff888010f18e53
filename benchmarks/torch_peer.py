"""LongNet attention in PyTorch over its CPU flash operator, as a worker that `compare.py` drives over pipes.

Written to be as fast as PyTorch allows: rows of a head are strided views copied once, branches are mixed by their
log-sum-exp in place, and the backward runs the flash backward on the *joint* output and log-sum-exp, so that no
branch output is kept. Heads must be a multiple of every rate, and segments must divide the length.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def rows_view(x: torch.Tensor, w: int, r: int) -> torch.Tensor:
    """(B, T, N, ...) -> a view (Z, N / r, r, m, ...) of each head's selected rows (head h has offset h mod r)."""
    batch, length, heads, *rest = x.shape
    x = x.view(batch * (length // w), w // r, r, heads // r, r, *rest).diagonal(dim1=2, dim2=4)
    return x.permute(0, 2, x.ndim - 1, 1, *range(3, x.ndim - 1))


def rows(x: torch.Tensor, w: int, r: int) -> torch.Tensor:
    """(B, T, N, ...) -> (Z, N, m, ...), copied unless r is 1."""
    view = rows_view(x, w, r)
    return view.reshape(view.shape[0], -1, *view.shape[3:])


class LongNet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, branches, causal):
        parts = [flash(*(rows(x, w, r) for x in (q, k, v)), 0.0, causal) for w, r in branches]
        lses = []
        for (w, r), (_, lse) in zip(branches, parts, strict=True):
            full = torch.full(q.shape[:3], -torch.inf)
            view = rows_view(full, w, r)
            view.copy_(lse.view(view.shape))
            lses.append(full)
        joint = torch.logsumexp(torch.stack(lses), 0)
        out = torch.zeros_like(q)
        for (w, r), (part, lse) in zip(branches, parts, strict=True):
            weight = torch.exp(lse - rows(joint, w, r)).unsqueeze(-1)
            view = rows_view(out, w, r)
            view.add_(part.mul_(weight).view(view.shape))
        ctx.save_for_backward(q, k, v, out, joint)
        ctx.branches, ctx.causal = branches, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        *qkv, out, joint = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in qkv]
        for w, r in ctx.branches:
            args = [rows(x, w, r) for x in (dout, *qkv, out)]
            for grad, part in zip(grads, flash_backward(*args, rows(joint, w, r), 0.0, ctx.causal), strict=True):
                view = rows_view(grad, w, r)
                view.add_(part.reshape(view.shape))
        return *grads, None, None


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    arrays: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            arrays = {n: torch.from_numpy(x) for n, x in np.load(request["load"]).items()}
            answer = {"torch": torch.__version__}
        else:
            qkv = [arrays[n].detach().requires_grad_(request["grad"]) for n in "qkv"]
            begin = time.perf_counter()
            out = LongNet.apply(*qkv, request["branches"], request["causal"])
            if request["grad"]:
                out.backward(arrays["g"])
            answer = {"seconds": time.perf_counter() - begin}
            if "save" in request:
                named = {
                    "out": out.detach(),
                    **({f"d{n}": x.grad for n, x in zip("qkv", qkv, strict=True)} if request["grad"] else {}),
                }
                np.savez(request["save"], **{n: x.numpy() for n, x in named.items()})
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
