"""`ringjax draw`: the data behind the pictures, image files, and text output."""

import dataclasses
import json

import numpy as np
import pytest
from cases import Case, count_matrix

from ringjax.cli.arguments import PlanOptions
from ringjax.cli.draw import draw, in_text
from ringjax.cli.main import main
from ringjax.cli.pictures import coverage_of, mask_of, pairs_between, schedule_of


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", ["mod", "block", "split"])
def test_mask_matches_the_definition(rule, is_causal):
    case = Case(length=48, batch=1, kv_heads=4, segment_lengths=(7, 16, 48), dilation_rates=(1, 3, 5), rule=rule)
    case = case._replace(is_causal=is_causal)
    options = {"heads": "split"} if rule == "split" else {"offsets": rule}
    job = PlanOptions(48, num_heads=4, pattern_text="7/1,16/3,48/5", is_causal=is_causal, **options)
    assert ((mask_of(job, 4) > 0) == (count_matrix(case)[0] > 0)).all()


def test_mask_contains_the_first_branch_and_query_heads_share_kv_heads():
    job = PlanOptions(8, num_heads=4, num_kv_heads=2, pattern_text="2/1,8/2", is_causal=True)
    mask = mask_of(job, 4)
    assert (mask[0] == mask[1]).all()
    assert (mask[0] != mask[2]).any()
    assert mask[0, 1, :2].tolist() == [1, 1]
    assert mask[0, 6].tolist() == [2, 0, 2, 0, 2, 0, 1, 0]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("text", "length"), [("16/1,64/4", 64), ("24/1,60/7", 64), ("5/2,33/3", 48)])
def test_ring_work_sums_to_the_flops_of_the_plan(text, length, layout):
    job = PlanOptions(length, num_heads=4, num_kv_heads=2, head_dim=8, pattern_text=text, ring_size=4, layout=layout)
    for is_causal in (False, True):
        plan = PlanOptions(**{**vars(job), "is_causal": is_causal}).plan()
        for branch in plan.branches:
            assert (4 * 8 * pairs_between(branch).sum(axis=1)).tolist() == list(branch.flops)


def test_every_device_attends_to_every_device_of_its_ring_once():
    job = PlanOptions(256, num_heads=2, pattern_text="32/1,64/2,T/4", ring_size=8, is_causal=True, strategy="ring")
    plan = job.plan()
    local, pairs, whole = (schedule_of(branch) for branch in plan.branches)
    assert (local.ring_devices, pairs.ring_devices, whole.ring_devices) == (1, 2, 8)
    assert all(sorted(row) == list(range(8)) for row in whole.source.tolist())
    assert whole.source[3].tolist() == [3, 2, 4, 1, 5, 0, 6, 7]  # from both sides
    assert (whole.work.sum(axis=1) == pairs_between(plan.branches[2]).sum(axis=1)).all()
    assert (whole.work[0, 1:] == 0).all()  # the first device attends only to its local keys
    even = schedule_of(PlanOptions(**{**vars(job), "layout": "zigzag"}).plan().branches[2]).work
    assert np.ptp(even[:, 1:]) == 0


def test_coverage_counts_the_branches_per_position():
    table, reach = coverage_of(PlanOptions(64, num_heads=4, pattern_text="8/2,T/4"), 64)
    assert table.shape == (4, 64)
    assert table[1, :8].tolist() == [0, 2, 0, 1, 0, 2, 0, 1]
    assert [(x.distance, x.density) for x in reach] == [(8, 0.5), (64, 0.25)]


@pytest.mark.parametrize(("what", "suffix"), [("mask", ".png"), ("coverage", ".svg"), ("ring", ".png")])
def test_pictures_are_saved_to_files(what, suffix, tmp_path, capsys):
    path = tmp_path / f"picture{suffix}"
    assert main(["draw", what, "--causal", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"command": "draw", "what": what, "file": str(path)}
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start
    assert path.stat().st_size > 10_000


def test_pictures_are_printed_as_text(capsys):
    assert main(["draw", "mask", "--seq-len", "8", "--pattern", "2/1,T/4", "--heads", "1", "--causal", "--ascii"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "1 . . . . . . .",
        "1 1 . . . . . .",
        ". . 1 . . . . .",
        ". . 1 1 . . . .",
        "2 . . . 1 . . .",
        ". . . . 1 1 . .",
        ". . . . . . 1 .",
        ". . . . . . 1 1",
    ]
    job = PlanOptions(64, num_heads=4, pattern_text="8/1,T/4", ring_size=4, is_causal=True, strategy="ring")
    ring = in_text("ring", job)
    assert "     2:   2▓   1█   3    0█\n     3:   3▓   2█   0█   1█" in ring
    assert "4 devices exchange heads: " in in_text("ring", dataclasses.replace(job, strategy="all_to_all"))
    assert "no communication" in ring
    assert "100.0% of (position, head) pairs covered; reach 60 of 64 positions" in in_text("coverage", job)


def test_missing_matplotlib_error_names_the_extra_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[plot\]' in a clone of ringjax, or use --ascii"):
        draw("mask", PlanOptions(8, num_heads=1, pattern_text="8/1"), tmp_path / "mask.png")


def test_an_exchange_gives_each_device_its_heads_and_equal_work():
    job = PlanOptions(64, num_heads=8, pattern_text="T/4", ring_size=4, is_causal=True, strategy="all_to_all")
    (branch,) = job.plan().branches
    schedule = schedule_of(branch)
    assert schedule.labels[:, 0].tolist() == ["h0-1", "h2-3", "h4-5", "h6-7"]
    shared = schedule_of(dataclasses.replace(job, num_heads=12, num_kv_heads=6).plan().branches[0])
    assert shared.labels[:, 0].tolist() == ["h0,2,4", "h1,3,5", "h6,8,10", "h7,9,11"]  # copies of keys for two devices
    split = schedule_of(dataclasses.replace(job, pattern_text="T/4,T/2", heads="split").plan().branches[1])
    assert split.labels[:, 0].tolist() == ["h4", "h5", "h6", "h7"]
    assert np.ptp(schedule.work) == 0
    assert schedule.work.sum() == pairs_between(branch).sum()
    teams = schedule_of(dataclasses.replace(job, num_heads=2, strategy="all_to_all_ring").plan().branches[0])
    assert teams.source.tolist() == [[0, 2], [0, 2], [2, 0], [2, 0]]
    assert teams.work.sum() == pairs_between(branch).sum() / 4  # a quarter of the heads
