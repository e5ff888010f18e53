"""A worker that runs PyTorch baselines. Its environment needs torch, numpy and dilated-attention-pytorch.

`longnet` implements LongNet (https://arxiv.org/abs/2307.02486) on PyTorch's CPU flash attention operator and is
optimized as far as PyTorch allows: each head's rows are strided views copied once, branches are combined in place by
their log-sum-exp, and the backward pass calls the flash backward with the *combined* output and log-sum-exp, so that
no branch output is stored. The number of heads must be a multiple of every rate, and segments must divide the length.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import torch
from serving import PeakMemory, apply_limits, make_inputs, serve, subsample
from workloads import Case

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def select_view(x: torch.Tensor, w: int, r: int) -> torch.Tensor:
    """Views (B, T, N, ...) as the selected rows of each head, (Z, N / r, r, m, ...). Head h has offset h mod r."""
    batch, length, heads, *rest = x.shape
    x = x.view(batch * (length // w), w // r, r, heads // r, r, *rest).diagonal(dim1=2, dim2=4)
    return x.permute(0, 2, x.ndim - 1, 1, *range(3, x.ndim - 1))


def select_rows(x: torch.Tensor, w: int, r: int) -> torch.Tensor:
    """Selects the rows of each head, (B, T, N, ...) -> (Z, N, m, ...); copies unless r is 1."""
    view = select_view(x, w, r)
    return view.reshape(view.shape[0], -1, *view.shape[3:])


class LongNet(torch.autograd.Function):
    """LongNet attention with a hand-written backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, branches, causal):
        parts = [flash(*(select_rows(x, w, r) for x in (q, k, v)), 0.0, causal) for w, r in branches]
        lses = []
        for (w, r), (_, lse) in zip(branches, parts, strict=True):
            full = torch.full(q.shape[:3], -torch.inf)
            view = select_view(full, w, r)
            view.copy_(lse.view(view.shape))
            lses.append(full)
        combined_lse = torch.logsumexp(torch.stack(lses), 0)
        out = torch.zeros_like(q)
        for (w, r), (part, lse) in zip(branches, parts, strict=True):
            weight = torch.exp(lse - select_rows(combined_lse, w, r)).unsqueeze(-1)
            view = select_view(out, w, r)
            view.add_(part.mul_(weight).view(view.shape))
        ctx.save_for_backward(q, k, v, out, combined_lse)
        ctx.branches, ctx.causal = branches, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        *qkv, out, combined_lse = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in qkv]
        for w, r in ctx.branches:
            args = [select_rows(x, w, r) for x in (dout, *qkv, out)]
            parts = flash_backward(*args, select_rows(combined_lse, w, r), 0.0, ctx.causal)
            for grad, part in zip(grads, parts, strict=True):
                view = select_view(grad, w, r)
                view.add_(part.reshape(view.shape))
        return *grads, None, None


def dense(q, k, v, causal: bool):
    """Computes PyTorch's `scaled_dot_product_attention` on (B, T, N, H) arrays."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)


def dilated_attention_pytorch(case: Case) -> Callable:
    """Returns dilated-attention-pytorch 0.2.0 with its xformers operator replaced by PyTorch's own attention."""
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


class Program:
    """An attention function together with its inputs."""

    def __init__(self, kind: str, case: Case, grad: bool):
        self.grad = grad
        self.inputs = [torch.from_numpy(x) for x in make_inputs(case)]
        self.attention = {
            "longnet": lambda q, k, v: LongNet.apply(q, k, v, case.branches, case.causal),
            "dense": lambda q, k, v: dense(q, k, v, case.causal),
            "split heads": dilated_attention_pytorch(case) if kind == "split heads" else None,
        }[kind]

    def run(self) -> tuple[float, list[torch.Tensor]]:
        *qkv, cotangent = self.inputs
        qkv = [x.detach().requires_grad_(self.grad) for x in qkv]
        start = time.perf_counter()
        out = self.attention(*qkv)
        if self.grad:
            out.backward(cotangent)
        seconds = time.perf_counter() - start
        return seconds, [out.detach(), *((x.grad for x in qkv) if self.grad else ())]


def main() -> None:
    apply_limits()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    programs: dict[str, Program] = {}

    def prepare(key: str, kind: str, case: dict, grad: bool, path: str | None = None, **_: object) -> dict:
        programs[key] = Program(kind, Case.from_dict(case), grad)
        seconds, outputs = programs[key].run()
        if path:
            np.savez(path, *(subsample(x.numpy()) for x in outputs))
        return {"first_s": seconds}

    def memory(key: str) -> dict:
        inputs = sum(x.nbytes for x in programs[key].inputs[: 4 if programs[key].grad else 3])
        with PeakMemory() as peak:
            programs[key].run()
        return {"bytes": inputs + peak.bytes}

    serve(
        {
            "info": lambda: {"platform": "cpu", "versions": {"torch": torch.__version__}},
            "prepare": prepare,
            "run": lambda key: {"seconds": programs[key].run()[0]},
            "memory": memory,
            "drop": lambda key: {"dropped": programs.pop(key, None) is not None},
        }
    )


if __name__ == "__main__":
    main()
