"""The plan: where branches run, bytes, flops, memory, advice and its printed table."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, count_matrix
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import ringjax as rj

PATTERN = rj.DilationPattern((2048, 8192, 65536), (1, 4, 16))
SHAPE = {"seq_len": 65536, "num_heads": 8, "head_dim": 64}


@pytest.mark.parametrize(
    ("layout", "ring_size", "ring_devices"),
    [
        ("contiguous", 2, [1, 1, 2]),
        ("contiguous", 8, [1, 1, 8]),
        ("contiguous", 16, [1, 2, 16]),
        ("zigzag", 8, [1, 2, 8]),
        ("zigzag", 16, [1, 4, 16]),
        ("zigzag", 32, [2, 8, 32]),
    ],
)
def test_segments_share_only_the_devices_they_span(layout, ring_size, ring_devices):
    plan = rj.plan(PATTERN, **SHAPE, ring_size=ring_size, layout=layout, strategy="ring")
    assert [b.ring_devices for b in plan.branches] == ring_devices
    assert [b.where for b in plan.branches] == ["local" if n == 1 else "ring" for n in ring_devices]
    assert [b.hops for b in plan.branches] == [n // 2 for n in ring_devices]  # in both directions
    assert all(b.is_aligned and not b.advice for b in plan.branches)


def test_sent_bytes_equal_a_calculation_by_hand():
    keys = 2 * (65536 // 8 // 16) * 8 * 64 * 2  # k and v, rows, heads, dim, bfloat16
    for device, directions in (("cpu", 1), ("v5p", 2)):
        branch = rj.plan(PATTERN, **SHAPE, ring_size=8, dtype="bfloat16", strategy="ring", device=device).branches[2]
        assert branch.sent(branch.forward) == 7 * keys
        sums = (9 - directions) * keys  # dq in float32
        queries = 7 * keys + sums + 7 * (2 * 512 * 8 * 4)  # q and dout; lse and delta
        assert (branch.moves, branch.directions, branch.sent(branch.backward)) == ("queries", directions, queries)
    gqa = rj.plan(PATTERN, **SHAPE, num_kv_heads=2, ring_size=8, dtype="bfloat16", strategy="ring").branches[2]
    assert (gqa.moves, gqa.sent(gqa.forward)) == ("keys", 7 * keys // 4)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("segment_lengths", "dilation_rates"), [((16, 48), (1, 4)), ((7, 29, 48), (2, 3, 5))])
def test_flops_of_each_device_equal_the_definition(layout, is_causal, segment_lengths, dilation_rates):
    case = Case(
        length=48,
        batch=1,
        kv_heads=3,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=is_causal,
    )
    sizes = {"seq_len": 48, "num_heads": 3, "head_dim": 8, "ring_size": 4}
    plan = rj.plan(case.pattern, **sizes, layout=layout, is_causal=is_causal, strategy="ring")
    attended = count_matrix(case)[0].sum(axis=(0, 2))  # number of keys to which each query position attends
    owner = np.asarray(rj.positions(layout, 48, 4)).reshape(4, 12)
    assert list(plan.flops) == [4 * 8 * attended[positions].sum() for positions in owner]


def test_zigzag_balances_causal_flops():
    options = {**SHAPE, "ring_size": 8, "is_causal": True, "strategy": "ring"}
    uneven, even = (rj.plan(PATTERN, **options, layout=layout) for layout in ("contiguous", "zigzag"))
    assert uneven.branches[2].balance > 1.8
    assert even.balance == pytest.approx(1, abs=1e-3)


def test_short_messages_are_gathered_if_the_memory_budget_allows():
    shape = {"seq_len": 4096, "num_heads": 1, "head_dim": 32, "ring_size": 8}
    pattern = rj.DilationPattern((4096,), (4,))
    assert rj.plan(pattern, **shape).branches[0].where == "all_gather"
    assert rj.plan(pattern, **shape, strategy="ring").branches[0].where == "ring"
    tight = rj.plan(pattern, **shape, strategy="ring").memory("tpu").gradient
    assert rj.plan(pattern, **shape, memory_budget=tight).branches[0].where == "ring"


def test_advice_names_the_alignment_rule_that_is_broken():
    plan = rj.plan(rj.DilationPattern((2048, 12288), (1, 6)), seq_len=12288, num_heads=8, head_dim=64, ring_size=8)
    assert [b.is_aligned for b in plan.branches] == [False, True]
    assert "segments of 2048 must consist of whole chunks of 1536" in plan.branches[0].advice
    rate = rj.plan(rj.DilationPattern((8192,), (6,)), seq_len=8192, num_heads=8, head_dim=64, ring_size=4).branches[0]
    assert (rate.ring_devices, rate.advice) == (4, "chunks of 2048 must be a multiple of the rate 6")


def test_padding_to_the_aligned_length_aligns_every_branch():
    shape = {"seq_len": 100_000, "num_heads": 8, "head_dim": 64, "ring_size": 8, "layout": "zigzag"}
    pattern = rj.DilationPattern((2048, 100_000), (1, 16))
    shape["strategy"] = "ring"
    slow = rj.plan(pattern, **shape)
    assert not any(b.is_aligned for b in slow.branches)
    assert slow.aligned_length == 16 * 8192
    assert "length=131072" in str(slow)
    fast = rj.plan(pattern, **shape, stored_length=slow.aligned_length)
    assert all(b.is_aligned for b in fast.branches)
    assert fast.spec.has_ids


def test_plan_is_cached_hashable_and_serializable():
    rj.pattern_cache_clear()
    first, second = (rj.plan(PATTERN, **SHAPE, ring_size=8, strategy="ring") for _ in range(2))
    assert first is second
    assert rj.pattern_cache_info()[:2] == (1, 1)
    assert hash(first) == hash(second)
    data = json.loads(json.dumps(first.to_dict()))
    assert [b["where"] for b in data["branches"]] == ["local", "local", "ring"]
    assert data["branches"][2]["forward_bytes"] == first.branches[2].sent(first.branches[2].forward)


def test_table_shows_lengths_branches_balance_and_advice():
    text = str(rj.plan(PATTERN, **{**SHAPE, "seq_len": 65000}, ring_size=8, is_causal=True, strategy="ring"))
    assert all(len(line) <= 120 for line in text.splitlines())
    for word in (
        "65,000 tokens",
        "2048/1",
        "ring (by position)",
        "balance",
        "zigzag",
        "segments of 2048 must divide chunks of",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"ring_size": 0}, "`ring_size` must be at least 1, got 0."),
        ({"layout": "spiral"}, "`layout` must be one of ('contiguous', 'zigzag'), got 'spiral'."),
        ({"strategy": "guess"}, "`strategy` must be one of ('auto', 'ring', 'all_gather', "),
        ({"num_kv_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`, got 8 and 3."),
        (
            {"head_shards": 3},
            "heads must divide evenly over the `head_shards` devices of `head_axis`, got 8 heads over 3 devices.",
        ),
        ({"stored_length": 65537}, "`stored_length` must be a multiple of 4 and at least 65536, got 65537."),
        ({"memory_budget": 1000}, "`memory_budget` must be at least"),
    ],
)
def test_invalid_values_raise_and_name_the_argument(keywords, text):
    with pytest.raises(ValueError, match="must") as caught:
        rj.plan(PATTERN, **{**SHAPE, "ring_size": 4, **keywords})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"pattern": (16, 32)}, "`pattern` must be a DilationPattern, got tuple."),
        ({"is_causal": 1}, "`is_causal` must be a bool, got 1."),
        ({"memory_budget": "1GB"}, "`memory_budget` must be an integer, got '1GB'."),
    ],
)
def test_invalid_types_raise_and_name_the_argument(keywords, text):
    with pytest.raises(ValueError, match="must") as caught:
        rj.plan(**{"pattern": PATTERN, **SHAPE, "ring_size": 4, **keywords})
    assert str(caught.value) == text


TPU = AbstractDevice(device_kind="TPU v5p", num_cores=1, platform="tpu")


@pytest.mark.parametrize("is_inside", [False, True], ids=["ring", "shard_map"])
def test_memory_budget_is_judged_by_the_platform_that_runs(is_inside):
    pattern = rj.DilationPattern((2048, 2**20), (1, 16))
    shape = {"seq_len": 2**20, "num_heads": 8, "head_dim": 128, "ring_size": 8, "dtype": "bfloat16"}
    on_cpu, on_tpu = (rj.plan(pattern, **shape, device=x).memory(x).gradient for x in ("cpu", "tpu"))
    assert on_cpu < on_tpu
    q = jax.ShapeDtypeStruct((1, 2**20, 8, 128), jnp.bfloat16)

    def run(device, budget):
        mesh = AbstractMesh((8,), ("ring",), axis_types=(AxisType.Auto,), abstract_device=device)
        if not is_inside:
            call = functools.partial(rj.dilated_attention, ring=rj.Ring(mesh, memory_budget=budget), pattern=pattern)
        else:
            local = functools.partial(rj.ring_dilated_attention, pattern=pattern, memory_budget=budget)
            spec = jax.P(None, "ring")
            call = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.eval_shape(call, q, q, q)

    run(None, on_cpu)
    run(TPU, on_tpu)
    with pytest.raises(ValueError, match=rf"`memory_budget` must be at least {on_tpu} bytes per device .* on tpu"):
        run(TPU, on_cpu)
    with pytest.raises(ValueError, match="on tpu"):
        rj.plan(pattern, **shape, device="tpu", memory_budget=on_cpu)


def test_forced_gather_beyond_the_memory_budget_raises():
    shape = {"seq_len": 4096, "num_heads": 4, "head_dim": 32, "ring_size": 8}
    pattern = rj.DilationPattern((4096,), (4,))
    tight = rj.plan(pattern, **shape, strategy="ring").memory("tpu").gradient
    with pytest.raises(ValueError, match=r"with strategy='all_gather', got .*; strategy='auto', a larger") as caught:
        rj.plan(pattern, **shape, strategy="all_gather", memory_budget=tight)
    least = int(re.findall(r"at least (\d+) bytes", str(caught.value))[0])
    assert least > tight
    assert rj.plan(pattern, **shape, strategy="all_gather", memory_budget=least).branches[0].where == "all_gather"


def test_budget_too_small_for_an_exchange_falls_back_to_a_ring():
    shape = {"seq_len": 65536, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "ring_size": 8}
    pattern = rj.DilationPattern((2048, 65536), (1, 2))
    exchanged, ring = (rj.plan(pattern, **shape, strategy=way, device="cpu") for way in ("all_to_all", "ring"))
    needed, least = (plan.memory("cpu").gradient for plan in (exchanged, ring))
    assert least < needed
    for budget, where in ((needed, "all_to_all"), (least, "ring")):
        chosen = rj.plan(pattern, **shape, device="cpu", memory_budget=budget)
        assert chosen.branches[1].where == where
        assert chosen.memory("cpu").gradient <= budget


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"is_causal": True, "strategy": "all_to_all"}, "contiguous"),
        ({"is_causal": True, "strategy": "all_to_all", "layout": "zigzag"}, "contiguous"),
        ({"is_causal": True, "strategy": "all_to_all_ring", "num_heads": 2}, "zigzag"),
        ({"is_causal": True, "strategy": "ring"}, "zigzag"),
        ({"is_causal": True, "strategy": "all_gather"}, "zigzag"),
        ({"strategy": "all_to_all"}, "contiguous"),
        ({"strategy": "ring"}, None),
        ({"segment": 16, "is_causal": True}, None),
    ],
)
def test_plan_names_the_best_layout(options, best):
    pattern = rj.DilationPattern((options.pop("segment", 64),), (4,))
    sizes = {"seq_len": 64, "num_heads": 4, "head_dim": 8, "ring_size": 4}
    text = str(rj.plan(pattern, **{**sizes, **options}))
    assert [name for name in ("contiguous", "zigzag") if f'Best layout: "{name}"' in text] == ([best] if best else [])


def test_inner_devices_must_divide_the_ring():
    with pytest.raises(ValueError, match="`inner_devices` must divide `ring_size`, got 3 and 8"):
        rj.plan(rj.DilationPattern((64,), (1,)), seq_len=64, num_heads=4, head_dim=8, ring_size=8, inner_devices=3)


def test_layout_does_not_matter_on_one_device():
    plan = rj.plan(rj.DilationPattern((11,), (1,)), seq_len=45, num_heads=1, head_dim=2, ring_size=1, layout="zigzag")
    assert plan.flops == (4 * 2 * (4 * 11 * 11 + 1),)
    assert "11/1" in str(plan)


def test_table_shows_when_heads_skip_residues():
    text = str(rj.plan(rj.DilationPattern((64,), (4,)), seq_len=64, num_heads=2, head_dim=8, ring_size=2))
    assert "64/4: the heads use 2 of 4 residues." in text


def test_plan_shows_why_kernels_do_not_apply():
    pattern = rj.DilationPattern((512, 4096), (1, 512))
    options = {"seq_len": 4096, "num_heads": 4, "head_dim": 64, "ring_size": 2}
    plan = rj.plan(pattern, **options, dtype=jnp.float16)
    tpu, gpu = ([b.kernels[target] for b in plan.branches] for target in ("tpu", "gpu"))
    few = "the gpu kernels take at least 16 selected rows per segment or chunk, not 4"
    assert gpu == ["pallas", few]
    assert set(tpu) == {"the tpu kernels take bfloat16, float32, not float16"}
    assert plan.to_dict()["branches"][1]["kernels"]["gpu"] == few
    text = " ".join(str(plan).split())
    assert f"On gpu, plain XLA computes 4096/512: {few}." in text
    assert "On tpu, plain XLA computes 512/1, 4096/512: the tpu kernels take bfloat16" in text
    assert "plain XLA" not in str(rj.plan(rj.DilationPattern((512, 4096), (1, 8)), **options, dtype=jnp.bfloat16))
