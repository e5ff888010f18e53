"""Ahead-of-time compilation without a compiler: targets, device order, and parsing of schedules and `ptxas` output."""

import dataclasses
import importlib
import re
import sys

import gpu_costs
import pytest
from ptxas import KernelResources, find_ptxas, kernel_resources, parse_launches, parse_ptxas, run_tool
from sass import hot_loop, innermost_loops

from ringjax._src.aot.compile import neighbor_cycle
from ringjax._src.aot.schedule import Kernel, parse, schedule
from ringjax._src.aot.targets import CUDA_TARGETS, TpuTarget, target_named

TPU_LOOP = """HloModule jit_ring, is_scheduled=true, num_partitions=8

%fused_add (param_0: s32[]) -> s32[] {
  %param_0 = s32[]{:T(128)} parameter(0)
  ROOT %add.1 = s32[]{:T(128)} add(%param_0, %param_0)
}

%body (carry: (s32[], bf16[2,8,512,128], f32[8,512,128])) -> (s32[], bf16[2,8,512,128], f32[8,512,128]) {
  %carry = (s32[]{:T(128)}, bf16[2,8,512,128]{3,2,1,0:T(8,128)(2,1)}, f32[8,512,128]{2,1,0:T(8,128)S(1)}) parameter(0)
  %hop = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %payload = bf16[2,8,512,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %copy.1 = bf16[2,8,512,128]{3,2,1,0:T(8,128)(2,1)} copy(%payload)
  %permute-start = (bf16[2,8,512,128]{3,2,1,0}, bf16[2,8,512,128]{3,2,1,0}, u32[]{:S(2)}, /*index=3*/u32[]{:S(2)}) \
collective-permute-start(%copy.1), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %meet_forward.3 = f32[8,512,128]{2,1,0:T(8,128)} custom-call(%payload), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"4096"}},"used_scoped_memory_configs":\
[{"memory_space":"1","offset":"0","size":"3915776"},{"memory_space":"2","offset":"0","size":"64"}]}
  %permute-done = bf16[2,8,512,128]{3,2,1,0} collective-permute-done(%permute-start)
  %next = s32[]{:T(128)} fusion(%hop), kind=kLoop, calls=%fused_add
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[2,8,512,128]{3,2,1,0}, f32[8,512,128]{2,1,0}) tuple(%next, %permute-done, \
%meet_forward.3)
}

%condition (carry.1: (s32[], bf16[2,8,512,128], f32[8,512,128])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, bf16[2,8,512,128]{3,2,1,0}, f32[8,512,128]{2,1,0}) parameter(0)
  ROOT %less = pred[]{:T(512)} constant(true)
}

ENTRY %main (q: bf16[2,8,512,128]) -> (s32[], bf16[2,8,512,128], f32[8,512,128]) {
  %q = bf16[2,8,512,128]{3,2,1,0} parameter(0)
  %rows = bf16[2,8,512,128]{3,2,1,0} negate(%q)
  %first-start = (bf16[2,8,512,128]{3,2,1,0}, bf16[2,8,512,128]{3,2,1,0}) collective-permute-start(%rows)
  %first-done = bf16[2,8,512,128]{3,2,1,0} collective-permute-done(%first-start)
  %start = (s32[], bf16[2,8,512,128]{3,2,1,0}, f32[8,512,128]{2,1,0}) tuple(%first-done)
  ROOT %loop = (s32[], bf16[2,8,512,128]{3,2,1,0}, f32[8,512,128]{2,1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def kernel_before_message(text):
    """Returns the loop with the kernel before the message instead of between start and done."""
    kernel = next(line for line in text.splitlines() if "meet_forward.3 =" in line)
    moved = text.replace(kernel + "\n", "")
    return re.sub(r"(?m)^  %permute-start =", kernel + r"\n\g<0>", moved)


def test_kernel_between_start_and_done_hides_the_message():
    read = schedule(TPU_LOOP)
    hop, first = read.permutes
    assert (hop.name, hop.computation, hop.in_hop_loop) == ("permute-start", "body", True)
    assert (hop.is_async, hop.between, hop.names) == (True, "kernel", ("meet_forward.3",))
    assert hop.bytes == 2 * 8 * 512 * 128 * 2
    assert (first.name, first.in_hop_loop, first.is_async, first.between) == ("first-start", False, True, "nothing")
    assert read.in_hop_loops == read.hidden() == (hop,)
    assert read.num_async == 2
    assert read.copied_bytes == hop.bytes
    assert read.kernels == (Kernel("meet_forward", "body", vmem_bytes=3915776, flops=4096),)
    cloned = schedule(TPU_LOOP.replace("meet_forward.3", "meet_forward.33.refs_2_"))
    assert [kernel.name for kernel in cloned.kernels] == ["meet_forward"]
    silent = schedule(TPU_LOOP.replace('"cost_estimate":{"flops":"4096"}', ""))
    assert [kernel.flops for kernel in silent.kernels] == [None]
    assert read.vmem_bytes == 3915776


@pytest.mark.parametrize("is_backward", [False, True])
def test_both_directions_are_in_flight_if_both_start_before_either_is_done(is_backward):
    scope = "branch1_w512_r1_bwd" if is_backward else "branch1_w512_r1"
    ahead, behind = "{{0,1},{1,2},{2,0}}", "{{0,2},{1,0},{2,1}}"
    text = TPU_LOOP.replace("{{0,1},{1,0}}", f'{ahead}, metadata={{op_name="jit(f)/{scope}/ppermute"}}')
    lines = text.splitlines()
    start, done = (next(x for x in lines if f"%permute-{name} =" in x) for name in ("start", "done"))
    others = [x.replace("%permute-", "%back-").replace(ahead, behind) for x in (start, done)]
    together = text.replace(start, f"{start}\n{others[0]}").replace(done, f"{done}\n{others[1]}")
    assert schedule(together).sends_both_ways(is_backward=is_backward)
    assert not schedule(together).sends_both_ways(is_backward=not is_backward)
    one_by_one = text.replace(done, f"{done}\n{others[0]}\n{others[1]}")
    assert not schedule(one_by_one).sends_both_ways(is_backward=is_backward)
    same_way = together.replace(behind, ahead)
    assert not schedule(same_way).sends_both_ways(is_backward=is_backward)


def test_kernel_before_the_message_does_not_hide_it():
    read = schedule(kernel_before_message(TPU_LOOP))
    (hop,) = read.in_hop_loops
    assert (hop.is_async, hop.between, hop.names) == (True, "nothing", ())
    assert read.hidden(("kernel", "dots")) == ()


KERNEL = 'custom-call(%x), custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(
    ("call", "called", "work"),
    [
        ("while(%payload), condition=%condition, body=%inner", KERNEL, "kernel"),
        ("conditional(%hop, %payload, %payload), branch_computations={%fused_add, %inner}", "dot(%x, %x)", "dots"),
        ("conditional(%hop, %payload), true_computation=%inner, false_computation=%fused_add", "dot(%x, %x)", "dots"),
        ("fusion(%payload), kind=kOutput, calls=%inner", "convolution(%x, %x), dim_labels=bf_io->bf", "dots"),
        ("fusion(%payload), kind=kLoop, calls=%inner", "negate(%x)", "nothing"),
        ('custom-call(%payload), custom_call_target="__cublas$gemm"', "negate(%x)", "dots"),
        ('custom-call(%payload), custom_call_target="AllocateBuffer"', "negate(%x)", "nothing"),
    ],
)
def test_work_is_found_in_called_computations(call, called, work):
    inner = f"%inner (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n  ROOT %y = f32[8] {called}\n}}\n\n"
    line = next(line for line in TPU_LOOP.splitlines() if "meet_forward.3 =" in line)
    text = TPU_LOOP.replace(line, f"  %meet_forward.3 = f32[8] {call}").replace("%fused_add (", inner + "%fused_add (")
    (hop,) = schedule(text).in_hop_loops
    assert hop.between == work


def test_single_instruction_message_is_synchronous():
    text = re.sub(r"(?m)^  %permute-start =.*\n", "", TPU_LOOP)
    text = text.replace("collective-permute-done(%permute-start)", "collective-permute(%copy.1)")
    (hop,) = schedule(text).in_hop_loops
    assert (hop.is_async, hop.between) == (False, "nothing")


CUDA_LOOP = """HloModule jit_ring, is_scheduled=true

%body.1 (p: (s32[], bf16[4,8], f32[2,8])) -> (s32[], bf16[4,8], f32[2,8]) {
  %p = (s32[], bf16[4,8]{1,0}, f32[2,8]{1,0}) parameter(0)
  %a = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %b = f32[2,8]{1,0} get-tuple-element(%p), index=2
  %send = ((bf16[4,8]{1,0}, f32[2,8]{1,0}), (bf16[4,8]{1,0}, f32[2,8]{1,0})) collective-permute-start(%a, %b), \
backend_config={"collective_backend_config":{"is_sync":false}}
  %pallas_call.5 = bf16[4,8]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={grid_x = 8 : i32, ir = "ML\\EFR({", name = "meet_forward", num_warps = 4 : i32}
  %sent = (bf16[4,8]{1,0}, f32[2,8]{1,0}) collective-permute-done(%send)
  ROOT %t = (s32[], bf16[4,8], f32[2,8]) tuple(%sent, %pallas_call.5)
}

ENTRY %main (q: (s32[], bf16[4,8], f32[2,8])) -> (s32[], bf16[4,8], f32[2,8]) {
  %q = (s32[], bf16[4,8], f32[2,8]) parameter(0)
  ROOT %loop = (s32[], bf16[4,8], f32[2,8]) while(%q), condition=%c, body=%body.1
}
"""


def test_message_with_several_operands_is_one_message():
    (hop,) = schedule(CUDA_LOOP).permutes
    assert (hop.is_async, hop.in_hop_loop, hop.between, hop.bytes) == (True, True, "kernel", 64 + 64)
    assert [kernel.name for kernel in schedule(CUDA_LOOP).kernels] == ["meet_forward"]
    assert schedule(CUDA_LOOP).vmem_bytes is None


def test_pair_marked_as_synchronous_is_synchronous():
    (hop,) = schedule(CUDA_LOOP.replace('"is_sync":false', '"is_sync":true')).permutes
    assert (hop.is_async, hop.between) == (False, "nothing")


def test_message_wrapped_in_an_async_pair_is_asynchronous():
    wrapped = "%wrapped (x: bf16[4,8]) -> bf16[4,8] {\n  %x = bf16[4,8] parameter(0)\n"
    wrapped += "  ROOT %inside = bf16[4,8] collective-permute(%x)\n}\n\n"
    text = CUDA_LOOP.replace("collective-permute-start(%a, %b)", "async-start(%a), calls=%wrapped")
    text = text.replace("collective-permute-done", "async-done").replace("%body.1 (", wrapped + "%body.1 (")
    (hop,) = schedule(text).permutes
    assert (hop.name, hop.is_async, hop.in_hop_loop, hop.between) == ("send", True, True, "kernel")


def test_loop_that_sends_computed_values_is_not_a_hop_loop():
    text = CUDA_LOOP.replace("get-tuple-element(%p), index=1", "negate(%p)").replace("(%a, %b)", "(%a)")
    (permute,) = schedule(text).permutes
    assert (permute.in_hop_loop, permute.between) == (False, "kernel")


@pytest.mark.parametrize(("result", "is_hop_loop"), [("%x0, %x1", True), ("%x0, %y", False), ("%x1, %x0", False)])
def test_payload_is_traced_through_barriers_and_loops_that_leave_it_unchanged(result, is_hop_loop):
    inner = f"""%inner (x: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %x = (s32[], bf16[4,8]) parameter(0)
  %x0 = s32[] get-tuple-element(%x), index=0
  %x1 = bf16[4,8] get-tuple-element(%x), index=1
  %y = bf16[4,8] negate(%x1)
  ROOT %r = (s32[], bf16[4,8]) tuple({result})
}}

"""
    through = """  %given = (s32[], bf16[4,8]) tuple(%b, %a)
  %worked = (s32[], bf16[4,8]) while(%given), condition=%c, body=%inner
  %waited = (s32[], bf16[4,8]) opt-barrier(%worked)
  %payload = bf16[4,8] get-tuple-element(%waited), index=1
  %send ="""
    text = (
        CUDA_LOOP.replace("  %send =", through)
        .replace("(%a, %b)", "(%payload)")
        .replace("%body.1 (", inner + "%body.1 (")
    )
    (permute,) = schedule(text).permutes
    assert permute.in_hop_loop == is_hop_loop


def test_unscheduled_program_raises():
    with pytest.raises(ValueError, match="scheduled"):
        schedule(TPU_LOOP.replace("is_scheduled=true, ", ""))


def test_parse_keeps_order_and_operands():
    body = parse(TPU_LOOP)["body"]
    assert [x.opcode for x in body[3:7]] == [
        "copy", "collective-permute-start", "custom-call", "collective-permute-done",
    ]  # fmt: skip
    assert body[4].operands == ("copy.1",)
    assert parse(TPU_LOOP)["main"][-1].callees == ("condition", "body")


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'meet_forward' for 'sm_90a'
ptxas info    : Function properties for meet_forward
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 66.185 ms
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
LAUNCHES = """001: kCopy         [source       | next=004 (3)] kCopy
002: kCustomKernel [source       | next=004 (2)] meet_forward grid: [8, 32, 1] threads: [128, 2, 1]  \
shared_memory: 32768 bytes
004: kWhile        [prev=003 (1) | sink        ]
    013: kCustomKernel [prev=012 (1) | sink ] loop_add_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""


def test_registers_and_spills_are_parsed_per_kernel():
    first, second = parse_ptxas(PTXAS)
    assert first == KernelResources("meet_forward", 255, 24 + 20, None, 512)
    assert second == KernelResources("loop_add_fusion", 8, 0, None, 0)
    copies = parse_ptxas(PTXAS.replace("meet_forward", "meet_forward_12"))
    assert (copies[0].name, copies[0].plain_name) == ("meet_forward_12", "meet_forward")


def test_threads_and_shared_memory_are_parsed_per_launch():
    assert parse_launches(LAUNCHES) == {"meet_forward": (256, 32768), "loop_add_fusion": (1, 0)}


def test_kernels_of_a_dump_directory_are_measured(tmp_path, monkeypatch):
    (tmp_path / "m.thunk_sequence.txt").write_text(LAUNCHES)
    (tmp_path / "m.1.ptx").write_text(".visible .entry meet_forward(\n)")
    (tmp_path / "m.2.ptx").write_text(".visible .entry loop_add_fusion(\n)")
    asked = []
    report = re.split(r"(?=ptxas info    : Compiling)", PTXAS)

    def ptxas(path, architecture):
        asked.append((path.name, architecture))
        return report[1] if path.name == "m.1.ptx" else report[2]

    monkeypatch.setattr("ptxas.compile_ptx", ptxas)
    (kernel,) = kernel_resources(tmp_path, "sm_90a", ["meet_forward"])
    assert kernel == KernelResources("meet_forward", 255, 44, 256, 512 + 32768)
    assert asked == [("m.1.ptx", "sm_90a")]
    assert len(kernel_resources(tmp_path, "sm_90a")) == 2
    with pytest.raises(FileNotFoundError, match="no_such"):
        kernel_resources(tmp_path, "sm_90a", ["no_such"])


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_ptxas_of_cuda_13_is_preferred(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    with pytest.raises(FileNotFoundError, match="`ptxas` was not found: install the package nvidia-cuda-nvcc"):
        find_ptxas()
    for folder in ("path", "site/nvidia/cuda_nvcc/bin", "site/nvidia/cu13/bin"):
        expected = executable(tmp_path / folder / "ptxas", "")
        importlib.invalidate_caches()
        assert find_ptxas() == expected


def test_failing_tool_is_reported_in_its_own_words(tmp_path, monkeypatch):
    executable(tmp_path / "ptxas", "#!/bin/sh\necho 'ptxas fatal   : Unsupported .version 9.0' >&2\nexit 255\n")
    monkeypatch.setattr("ptxas.find_tool", lambda name: str(tmp_path / name))
    with pytest.raises(RuntimeError, match=r"`ptxas a.ptx` exited with code 255: ptxas fatal .*Unsupported .version 9"):
        run_tool("ptxas", "a.ptx")


# Two loops over key blocks, the second with a mask, and a wait behind the end that jumps back into the second.
SASS = """
        .section        .text.ringjax_forward,"ax",@progbits
.text.ringjax_forward:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
.L_x_0:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   FFMA R4, R24, R5, -R6 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR12], R88 ;
        /*0080*/              @UP0 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   STL [R1+0x4], R9                                 (*"SpillRefill"*);
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
.L_x_4:
        /*00b0*/                   FSEL R24, R24, -INF , P2 ;
        /*00c0*/                   LDL R9, [R1+0x4] ;
        /*00d0*/                   FFMA R4, R24, R5, -R6 ;
        /*00e0*/                   MUFU.EX2 R4, R4 ;
        /*00f0*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR12], R88 ;
        /*0100*/               @P3 BRA `(.L_x_2) ;
        /*0110*/                   EXIT ;
        /*0120*/                   BRA `(.L_x_4) ;
"""


def test_hot_loop_is_the_shortest_with_all_matrix_instructions():
    loop = hot_loop(SASS)
    assert (loop.instructions, loop.matrix_instructions, loop.spills) == (7, 2, 0)
    assert loop.opcodes["MUFU"] == 1
    assert [(x.instructions, x.matrix_instructions, x.spills) for x in innermost_loops(SASS)] == [
        (7, 2, 0), (8, 2, 2), (8, 1, 1),
    ]  # fmt: skip


def test_listing_without_a_matrix_loop_raises():
    with pytest.raises(ValueError, match="`listing` must contain a loop with one of HMMA, HGMMA, UTCHMMA"):
        hot_loop(SASS.replace("HGMMA", "FFMA"))


def test_kernel_costs_beyond_their_limits_fail():
    most = gpu_costs.MOST_INSTRUCTIONS["H100"]["forward"]
    good = gpu_costs.Cost("H100", "forward", 200, 0, 0, 65536, 8, most)
    peer = dataclasses.replace(good, instructions=int(most / gpu_costs.MOST_OF_PEER["forward"]) + 1)
    assert good.failures(peer) == []
    (slow,) = dataclasses.replace(good, instructions=most + 1).failures(None)
    assert slow == f"issues {most + 1} instructions per tile, more than {most}"
    (slow,) = good.failures(dataclasses.replace(peer, instructions=most // 2))
    assert "times the instructions of attention_mgpu, limit" in slow
    spilling = dataclasses.replace(good, spilled_bytes=8, loop_spills=2).failures(peer)
    assert spilling == ["spills registers in its loop, in 2 instructions", "spills 8 bytes, more than 0"]


@pytest.mark.parametrize(
    "grid", [(2, 4), (4, 2), (4, 4), (2, 2, 2), (3, 4), (4, 3), (2, 3, 3), (3, 3, 2), (1, 8, 2), (2,)]
)
def test_neighbor_cycle_visits_every_device_in_single_steps(grid):
    points = neighbor_cycle(grid)
    assert len(points) == len(set(points)) > 0
    assert {len(point) for point in points} == {len(grid)}
    assert [max(axis) + 1 for axis in zip(*points, strict=True)] == list(grid)
    steps = [
        sum(abs(a - b) for a, b in zip(here, there, strict=True))
        for here, there in zip(points, points[1:] + points[:1], strict=True)
    ]
    assert set(steps) == {1}


def test_odd_grid_raises():
    with pytest.raises(ValueError, match=r"`grid`.*\(3, 3\)"):
        neighbor_cycle((3, 3))


def test_tpu_targets_are_parsed():
    target = target_named("v5p:2x2x2")
    assert (target.grid, target.devices, target.platform) == ((2, 2, 2), 8, "tpu")
    assert TpuTarget("v5e:4x4").memory_bytes == 16 * 2**30
    for wrong in ("v1:2x2", "v5e", "v5e:2by4", "H1000"):
        with pytest.raises(ValueError, match="`topology`"):
            target_named(wrong)


FIELD = re.compile(r"(\w+): (\"[^\"]*\"|[\w.]+)")


@pytest.mark.parametrize("name", CUDA_TARGETS)
def test_cuda_description_matches_the_specifications(name):
    target = target_named(name)
    facts, text = target.facts, target.description()
    fields = dict(FIELD.findall(text))
    assert fields["core_count"] == str(facts.multiprocessors)
    assert int(fields["shared_memory_per_block_optin"]) == int(fields["shared_memory_per_core"]) - 1024
    assert int(fields["device_memory_size"]) == target.memory_bytes
    assert (int(fields["major"]), int(fields["minor"])) == facts.capability
    assert fields["device_description_str"] == fields["name"] == f'"{facts.product}"'
    assert text.count("{") == text.count("}") == 3
    assert (
        len(FIELD.findall(text.partition("platform_name")[0])) == len(set(FIELD.findall(text))) - 2
    )  # no field occurs twice


def test_cuda_targets_have_the_ptxas_architecture():
    assert {name: target.architecture for name, target in CUDA_TARGETS.items()} == {
        "A100": "sm_80", "H100": "sm_90a", "B200": "sm_100a",
    }  # fmt: skip
    assert {target.topology for target in CUDA_TARGETS.values()} == {"1x1x8"}


OFFLOADED = """HloModule test, is_scheduled=true

%offloaded (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %all-to-all.1 = f32[4,8]{1,0} all-to-all(%p), dimensions={0}
}, execution_thread="sparsecore"

%body (carry: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %carry = (s32[], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %begin = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%offloaded
  %early = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %given = ((f32[4,8]), f32[4,8]) call-update(%begin, %x)
  WORK
  %end = f32[4,8]{1,0} call-done(%given)
  ROOT %next = (s32[], f32[4,8]) tuple(%i, %end)
}

%condition (carry: (s32[], f32[4,8])) -> pred[] {
  %carry.1 = (s32[], f32[4,8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %bound = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %arg = (s32[], f32[4,8]) parameter(0)
  ROOT %loop = (s32[], f32[4,8]) while(%arg), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("work", "between"),
    [('%late = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"', "kernel"), ("", "nothing")],
)
def test_offloaded_exchange_is_in_flight_once_its_operand_is_given(work, between):
    (message,) = schedule(OFFLOADED.replace("WORK", work)).exchanges
    assert (message.is_async, message.between, message.bytes, message.number) == (True, between, 128, 6)


def test_loop_beside_a_message_is_reported():
    work = "%packed = (s32[], f32[4,8]) while(%carry), condition=%condition, body=%pack"
    (message,) = schedule(OFFLOADED.replace("WORK", work)).exchanges
    assert (message.between, message.beside_loop) == ("nothing", True)
