"""The command line: exit codes, one-line errors, JSON, and the report of `ringjax plan`."""

import dataclasses
import json
import subprocess
import sys

import pytest

import ringjax as rj
from ringjax._src.comm.devices import DEVICES
from ringjax.cli.arguments import PlanOptions, parse_bytes, parse_count, parse_pattern
from ringjax.cli.main import COMMANDS, main, parser
from ringjax.cli.plan import longest_that_fits, plan_report, sweep
from ringjax.cli.roofline import estimate

PLAN = ["plan", "--seq-len", "64K", "--heads", "8", "--head-dim", "64", "--pattern", "2K/1,T/16", "--ring", "8"]
JOB = PlanOptions(
    65536, num_heads=8, head_dim=64, pattern_text="2K/1,T/16", ring_size=8, is_causal=True, layout="zigzag"
)


def command(*words):
    return subprocess.run([sys.executable, "-m", "ringjax", *words], capture_output=True, text=True, check=False)


def json_output(capsys, *words):
    """Returns the JSON output of a command."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_takes_the_options_of_patterns(capsys):
    options = ["--offsets", "block", "--mixing", "detached", "--padding", "zeros"]
    output = json_output(capsys, *PLAN, *options)
    assert output["plan"]["pattern"].endswith("offsets='block', mixing='detached', padding='zeros')")


def test_plan_counts_the_gradients_of_sinks(capsys):
    plans = [json_output(capsys, *PLAN, *options)["plan"] for options in ([], ["--sinks"])]
    assert [[message["op"] for message in plan["backward"]] for plan in plans] == [[], ["all-reduce"]]


def test_plan_prints_json():
    done = command(*PLAN, "--causal", "--device", "h100", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)
    assert {"command", "plan", "memory", "fits", "longest_seq_len", "estimate", "warnings", "best"} <= set(output)
    assert [b["where"] for b in output["plan"]["branches"]] == ["local", "all_to_all"]
    assert output["estimate"]["is_estimate"] is True


def test_invalid_choice_is_a_one_line_error():
    done = command(*PLAN, "--layout", "spiral")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ringjax plan: error: argument --layout: invalid choice: 'spiral'")
    assert line.endswith("(see ringjax plan --help)")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plan", "--seq-len", "1X"], "--seq-len: must be a whole number such as 65536, 256K or 1M, got '1X'"),
        (["plan", "--memory", "80"], None),
        (["plan", "--memory", "80XB"], "--memory: must be an amount of memory such as 80GB or 16GiB, got '80XB'"),
        (["plan", "--pattern", "2K-1"], "--pattern must be longnet, auto, or segments/rates such as 2K/1,16K/4,T/16"),
        (["plan", "--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 16 and 3"),
        (["plan", "--sweep", "ring"], "--sweep must be a name and values such as ring=1,2,4,8, got 'ring'"),
        (["plan", "--sweep", "mood=1,2"], "--sweep must name one of ring, seq-len"),
        (["plan", "--sweep", "layout=spiral"], "--sweep layout values must be among contiguous, zigzag"),
        (["draw", "mask", "--seq-len", "64K"], "--seq-len must be at most 1024 to draw a mask, got 65536"),
        (["draw", "mask", "-o", "mask.gif"], "--output must name a .png or .svg file, got 'mask.gif'"),
        (["draw", "ring", "--ring", "1"], "--ring must be from 2 to 64 to draw a ring, got 1"),
        (["aot", "--target", "tpu:v9:2x2"], "must be one of ('v5e', 'v5p', 'v6e'), a colon and a grid"),
        (["aot", "--target", "cuda:h100:8"], "such as cuda:h100:1x8x8, got 'cuda:h100:8'"),
        (["aot"], "the following arguments are required: --target"),
        (["tune", "--ring", "9"], "--ring must be at most 8, the number of available devices, got 9"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_invalid_input_is_a_one_line_error(words, text, capsys):
    code = main(words)
    output = capsys.readouterr()
    if text is None:
        assert (code, output.err) == (0, "")
        return
    assert (code, output.out) == (2, "")
    (line,) = output.err.splitlines()
    assert line.startswith("ringjax")
    assert text in line
    assert "--help" in line


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["plan", "--seqlen", "64K"], "; did you mean --seq-len?"),
        (["plan", "--num-heads=8", "--casual"], "; did you mean --heads and --causal?"),
        (["draw", "mask", "--ouput", "mask.png"], "; did you mean --output?"),
        (["aot", "--target", "cpu:2", "--patern", "T/1"], "; did you mean --pattern?"),
        (["doctor", "--cpudevices", "2"], "; did you mean --cpu-devices?"),
        (["tune", "--second", "1", "--fly"], ""),
    ],
)
def test_unknown_option_error_suggests_an_option_of_the_command(words, suggestion, capsys):
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"ringjax {words[0]}: error: unrecognized arguments: --")
    assert line.endswith(f"{suggestion} (see ringjax {words[0]} --help)\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert f"ringjax {name}" in output.partition("examples:")[2]
    assert "--json" in output


def test_sizes_and_patterns_are_parsed():
    assert [parse_count(x) for x in ("1M", "1.5K", "1,000", "7")] == [2**20, 1536, 1000, 7]
    assert [parse_bytes(x) for x in ("80GB", "1.5GiB", "12")] == [80 * 10**9, 3 * 2**29, 12]
    assert parse_pattern("2K/1, T/16", 4096) == rj.DilationPattern((2048, 4096), (1, 16))
    assert parse_pattern("longnet", 4096) == rj.DilationPattern.longnet()
    assert parse_pattern("auto", 2**20, offsets="block").offsets == "block"
    for wrong in ("0", "-1", "1.2345", "x", ""):
        with pytest.raises(ValueError, match="must be a whole number"):
            parse_count(wrong)


def test_plan_output_matches_the_library(capsys):
    output = json_output(capsys, *PLAN, "--causal")
    made = rj.plan(
        rj.DilationPattern((2048, 65536), (1, 16)),
        seq_len=65536,
        num_heads=8,
        head_dim=64,
        ring_size=8,
        is_causal=True,
        layout="contiguous",  # the default unless keys rotate
        dtype="bfloat16",
    )
    assert output["plan"] == json.loads(json.dumps(made.to_dict()))
    assert output["memory"] == {"forward_bytes": made.forward_memory, "training_bytes": made.gradient_memory}
    assert (output["fits"], output["estimate"], output["longest_seq_len"]) == (None, None, None)
    assert main([*PLAN, "--causal", "--device", "v5p"]) == 0
    text = capsys.readouterr().out
    for word in (
        "65536/16",
        "Memory per device (estimate, tpu",
        "ESTIMATE",
        "fits in 95.0 GiB",
        "Best: --layout contiguous",
    ):
        assert word in text, word
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("changes", "about", "fix", "fixed"),
    [
        (
            {"layout": "contiguous", "strategy": "ring"},
            "the busiest device does",
            "--layout zigzag",
            {"layout": "zigzag"},
        ),
        (
            {"seq_len": 65000, "pattern_text": "2K/1,T/16", "strategy": "ring"},
            "uses the slower position-based path",
            "--stored-length 65536",
            {"stored_length": 65536},
        ),
        (
            {"pattern_text": "2K/2,T/16"},
            "are selected by no branch",
            "a branch of rate 1",
            {"pattern_text": "2K/1,T/16"},
        ),
        (
            {"pattern_text": "2K/1"},
            "a query attends to at most",
            "such as --pattern ...,T/4",
            {"pattern_text": "2K/1,T/4"},
        ),
        ({"device": "v5e", "dtype": "float16"}, "instead of a kernel", "--dtype bf16", {"dtype": "bfloat16"}),
        (
            {"device": "h100", "ring_size": 64, "pattern_text": "T/512"},
            "of the communication time is not hidden",
            "use a smaller --ring",
            {"ring_size": 1},
        ),
    ],
)
def test_each_warning_has_a_fix_that_removes_it(changes, about, fix, fixed):
    job = dataclasses.replace(JOB, **changes)
    if changes.get("pattern_text") == "2K/2,T/16":
        job = dataclasses.replace(job, num_kv_heads=1)
        fixed = {**fixed, "num_kv_heads": 8}
    (found,) = [w for w in plan_report(job).warnings if about in w.about][:1]
    assert fix in found.fix
    after = plan_report(dataclasses.replace(job, **fixed)).warnings
    assert not [w for w in after if about in w.about]


def test_insufficient_memory_suggests_a_larger_ring():
    job = dataclasses.replace(JOB, seq_len=2**20, memory=10**9)
    (found,) = [
        w for w in plan_report(job).warnings if w.about == "training needs more than 953.7 MiB of memory per device"
    ]
    ring = int(found.fix.removeprefix("--ring "))
    assert plan_report(dataclasses.replace(job, ring_size=ring)).fits
    assert not plan_report(dataclasses.replace(job, ring_size=ring // 2)).fits
    (hopeless,) = [w for w in plan_report(dataclasses.replace(JOB, memory=1000)).warnings if "needs more" in w.about]
    assert "fewer tokens" in hopeless.fix


def test_balanced_plan_has_no_warnings():
    report = plan_report(dataclasses.replace(JOB, seq_len=2**20, device="h100", pattern_text="2K/1,T/16"))
    assert report.warnings == []
    assert (report.fits, report.best.layout) == (True, "contiguous")


def test_heads_that_use_only_some_residues_are_noted(capsys):
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert "Note: 65536/16: the heads use 8 of 16 residues.\n    Fix: use a rate of at most 8" in text
    assert json_output(capsys, *PLAN)["notes"][0]["about"] == "65536/16: the heads use 8 of 16 residues"
    assert json_output(capsys, *PLAN, "--heads", "16")["notes"] == []


def test_best_layout_is_contiguous_without_causality():
    assert plan_report(dataclasses.replace(JOB, is_causal=False, layout="zigzag")).best.layout == "contiguous"


def test_best_choice_keeps_the_stored_length():
    job = dataclasses.replace(JOB, seq_len=300 * 1024, num_heads=6, device="h100", pattern_text="2K/1,32K/8,T/64")
    padded = dataclasses.replace(job, stored_length=2**19)
    assert {x.stored_length for x in padded.variants} == {2**19}
    assert plan_report(padded).best.cost < plan_report(job).best.cost


def test_imbalance_of_unaligned_branches_suggests_an_aligned_length():
    job = dataclasses.replace(JOB, seq_len=300 * 1024, num_heads=6, pattern_text="2K/1,32K/8,T/64", layout="zigzag")
    (found,) = [x for x in plan_report(job).warnings if "times the mean work" in x.about]
    assert found.fix == "align the branches: --stored-length 524288"
    aligned = dataclasses.replace(job, stored_length=524288)
    assert not [x for x in plan_report(aligned).warnings if "times the mean work" in x.about]


def test_sweep_tabulates_the_values_of_one_option(capsys):
    output = json_output(capsys, *PLAN, "--device", "v5p", "--sweep", "ring=1,2,4,8")
    training = [row["memory"]["gradient"] for row in output["rows"]]
    assert training == sorted(training, reverse=True)
    assert [row["value"] for row in output["rows"]] == ["1", "2", "4", "8"]
    assert output["rows"][0]["sent"] == 0
    assert all(row["longest"] > 65536 and row["fits"] for row in output["rows"])
    assert sweep(JOB, "kv-heads", ["3"])[0].error.startswith("`num_heads` must be a multiple")
    assert main([*PLAN, "--sweep", "dtype=bf16,f32"]) == 0
    assert "training memory" in capsys.readouterr().out


def test_longest_sequence_fits_and_a_longer_one_does_not():
    job = dataclasses.replace(JOB, memory=10**9)
    longest = longest_that_fits(job)
    needs = [dataclasses.replace(job, seq_len=n).plan().memory("cpu").gradient for n in (longest, longest * 51 // 50)]
    assert needs[0] <= 10**9 < needs[1]
    assert longest_that_fits(dataclasses.replace(JOB, memory=1000)) == 0


def test_estimate_matches_a_manual_calculation():
    job = dataclasses.replace(JOB, strategy="ring", device="h100")
    plan = job.plan()
    local, ring = estimate(plan).forward
    assert local.compute == pytest.approx(max(plan.branches[0].flops) / 989e12)
    assert (local.link, local.exposed) == (0, 0)
    keys = 7 * 2 * (65536 // 8 // 16) * 8 * 64 * 2  # seven hops of k and v, bfloat16
    assert ring.link == pytest.approx(keys / 450e9)
    work = max(ring.compute, ring.memory)
    assert ring.total == pytest.approx(7 * max(work / 8, ring.link / 7) + work / 8)
    whole = estimate(plan)
    assert 0 <= whole.hidden <= 1
    assert whole.training_seconds > whole.forward_seconds > 0
    assert estimate(dataclasses.replace(job, ring_size=1).plan()).hidden == 1


def test_a_ring_over_two_axes_exchanges_heads_within_a_machine(capsys):
    machines = [*PLAN, "--ring", "16", "--strategy", "all_to_all_ring", "--inner-devices"]
    for size in (8, 4):
        branch = json_output(capsys, *machines, str(size))["plan"]["branches"][1]
        assert (branch["where"], branch["exchange_devices"]) == ("all_to_all_ring", size)
    job = dataclasses.replace(JOB, ring_size=16, num_heads=16, device="h100", strategy="ring")
    inside, between = (dataclasses.replace(job, inner_devices=n).plan() for n in (16, 8))
    links = [estimate(plan).forward[-1].link for plan in (inside, between)]
    assert links[0] == links[1]  # 16 GPUs are two machines, whichever axes they are on
    assert estimate(dataclasses.replace(job, ring_size=8).plan()).forward[-1].link < links[0] / 8
    assert main([*machines, "3"]) == 2
    assert "--inner-devices must divide --ring, got 3 and 16" in capsys.readouterr().err


def test_best_choice_is_that_of_the_strategy_auto():
    job = dataclasses.replace(JOB, device="h100")
    auto = sum(branch.seconds for branch in job.plan().branches)
    assert plan_report(job).best.cost <= auto


def test_large_gpu_rings_use_the_network_bandwidth():
    assert DEVICES["h100"].hop_bandwidth(4) == 450e9
    assert DEVICES["h100"].hop_bandwidth(64) == 50e9
    assert DEVICES["v5p"].hop_bandwidth(4096) == 100e9
