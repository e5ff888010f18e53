"""A worker with PyTorch's attentions. Its environment has torch, numpy and, for one of them, dilated-attention-pytorch.

`longnet` is written over the CPU flash operator, as fast as PyTorch allows: rows of a head are strided views copied
once, branches are mixed by their log-sum-exp in place, and the backward pass runs the flash backward on the *joint*
output and log-sum-exp, so that no branch output is kept. Heads must be a multiple of every rate, and segments must
divide the length.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import torch
from serving import PeakMemory, confine, for_comparing, host_arrays, serve
from workloads import Case

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


def dense(q, k, v, causal: bool):
    """PyTorch's own attention, of (B, T, N, H)."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)


def grouped(case: Case) -> Callable:
    """dilated-attention-pytorch 0.2.0, with PyTorch's own attention in the place of the xformers operator."""
    operators = types.ModuleType("xformers.ops")
    operators.AttentionOp = operators.LowerTriangularMask = type("LowerTriangularMask", (), {})
    operators.memory_efficient_attention = lambda query, key, value, op, attn_bias: dense(
        query, key, value, attn_bias is not None
    )
    sys.modules.setdefault("xformers", types.ModuleType("xformers")).ops = operators
    sys.modules["xformers.ops"] = operators
    from dilated_attention_pytorch.dilated_attention import DilatedAttention  # noqa: PLC0415

    layer = DilatedAttention(case.segment_lengths, case.dilation_rates)
    return lambda q, k, v: layer(q, k, v, is_causal=case.causal)


class Contender:
    """One attention with its arrays in place."""

    def __init__(self, kind: str, case: Case, grad: bool):
        self.grad = grad
        self.inputs = [torch.from_numpy(x) for x in host_arrays(case)]
        self.attention = {
            "longnet": lambda q, k, v: LongNet.apply(q, k, v, case.branches, case.causal),
            "dense": lambda q, k, v: dense(q, k, v, case.causal),
            "grouped": grouped(case) if kind == "grouped" else None,
        }[kind]

    def run(self) -> tuple[float, list[torch.Tensor]]:
        *qkv, cotangent = self.inputs
        qkv = [x.detach().requires_grad_(self.grad) for x in qkv]
        begin = time.perf_counter()
        out = self.attention(*qkv)
        if self.grad:
            out.backward(cotangent)
        seconds = time.perf_counter() - begin
        return seconds, [out.detach(), *((x.grad for x in qkv) if self.grad else ())]


def main() -> None:
    confine()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    contenders: dict[str, Contender] = {}

    def prepare(key: str, kind: str, case: dict, grad: bool, path: str | None = None, **_: object) -> dict:
        contenders[key] = Contender(kind, Case.from_dict(case), grad)
        seconds, outputs = contenders[key].run()
        if path:
            np.savez(path, *(for_comparing(x.numpy()) for x in outputs))
        return {"first_s": seconds}

    def memory(key: str) -> dict:
        inputs = sum(x.nbytes for x in contenders[key].inputs[: 4 if contenders[key].grad else 3])
        with PeakMemory() as peak:
            contenders[key].run()
        return {"bytes": inputs + peak.bytes}

    serve(
        {
            "info": lambda: {"platform": "cpu", "versions": {"torch": torch.__version__}},
            "prepare": prepare,
            "run": lambda key: {"seconds": contenders[key].run()[0]},
            "memory": memory,
            "drop": lambda key: {"dropped": contenders.pop(key, None) is not None},
        }
    )


if __name__ == "__main__":
    main()
