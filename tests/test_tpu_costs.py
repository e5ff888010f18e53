"""The static cost of TPU kernels: parsing of the compiler's schedules, and limits."""

import dataclasses

import pytest
import tpu_costs
from tpu_costs import LONG, Cost, Shape, checks
from tpu_schedule import parse_kernel, read_kernels

# one grid step: a copy from HBM, a begin of 40 cycles, steps of 60 and 50 cycles, and an end of 33 cycles
REGIONS = """$region0: #{my_kernel.1}
  #allocation0 [shape = 'f32[8,128]{1,0:T(8,128)}', space=vmem, size = 0x1000]
  // region range: [0, 220)
  $region3: #{my_kernel.1} parent=0 // loop_body
    // region range: [10, 210)
    $region4: #{my_kernel.1} parent=3 // pred_region
      // region range: [12, 20)
      %7 = shalt.err (!%p6) /* BoundsCheck 2 for %8 = dma.hbm_to_vmem (%p5), /*hbm=*/%s1, /*size_in_granules=*/64 */
      %8 = dma.hbm_to_vmem [thread:$0] (%p5), /*hbm=*/%s1, /*size_in_granules=*/64, /*vmem=*/%s2
    $region5: #{my_kernel.1} parent=3 // pred_region
      // region range: [20, 205)
      $region6: #{my_kernel.1} parent=5 // pred_region
        // region range: [20, 60)
      $region7: #{my_kernel.1} parent=5 // pred_fallthru
        // region range: [60, 60)
      $region8: #{my_kernel.1} parent=5 // pred_region
        // region range: [60, 110)
      $region9: #{my_kernel.1} parent=5 // pred_region
        // region range: [112, 172)
      $region10: #{my_kernel.1} parent=5 // pred_region
        // region range: [172, 205)
        %9 = dma.vmem_to_hbm [thread:$0] /*vmem=*/%s3, /*size_in_granules=*/128, /*hbm=*/%s4
"""
_LINES = ["0 1 0"] * 60 + ["1 2 0"] * 50 + ["0 0 0"] * 2 + ["2 4 1"] * 60 + ["0 0 2"] * 48
SLOTS = "\n".join(["== CAPACITY:", "MXU, VALU, VSTORE:SPILL", "    2     4     1", "== UTILIZATION:", *_LINES])


def test_steps_edges_and_overhead_are_found_by_region():
    kernel = parse_kernel("my_kernel", REGIONS, SLOTS)
    assert [x.cycles for x in kernel.steps] == [60, 50]
    assert [x.cycles for x in kernel.edges] == [40, 33]
    assert kernel.overhead == 200 - 60 - 50 - 40 - 33
    assert kernel.utilization(kernel.steps[0]) == {"MXU": 1.0, "VALU": 1.0, "VSTORE:SPILL": 1.0}
    assert kernel.utilization(kernel.steps[1]) == {"MXU": 0.5, "VALU": 0.5, "VSTORE:SPILL": 0.0}
    assert [(x.direction, x.bytes) for x in kernel.dmas] == [("hbm_to_vmem", 64 * 32), ("vmem_to_hbm", 128 * 32)]


def test_dumped_kernels_are_read_by_name(tmp_path):
    for name in ("ringjax_forward.1", "fusion.2"):
        (tmp_path / f"17-{name}-66-post-bundle-packing-post-ra.txt").write_text(REGIONS)
        (tmp_path / f"17-{name}-68-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(SLOTS)
    (kernel,) = read_kernels(tmp_path, "ringjax")
    assert kernel.name == "ringjax_forward.1"
    assert read_kernels(tmp_path, "splash") == []


def test_dump_that_misses_cycles_raises():
    with pytest.raises(ValueError, match="must span the 219 cycles"):
        parse_kernel("my_kernel", REGIONS, SLOTS.rsplit("\n", 1)[0])


def cost(owner="ringjax", kernel="forward", shape=LONG, block=1024, **fields):
    values = {"tasks": 1, "plain": 100, "diagonal": 60, "edges": 10, "overhead": 1, "used": {}} | fields
    return Cost(owner, kernel, shape, query_block=block, key_block=block, compute_block=block, **values)


def test_cycles_per_task_count_every_step():
    causal = cost(shape=Shape(rows=2048, tasks=4, is_causal=True, block=1024))
    assert causal.per_task == 2 * 60 + 1 * 100 + 2 * 10 + 4 * 1
    assert causal.per_tile == pytest.approx(causal.per_task / (2048 * 2049 / 2 / 128**2))
    full = cost(shape=Shape(rows=512, tasks=4, is_causal=False, block=512), block=512, tasks=2)
    assert full.per_task == (100 + 10 + 1) / 2


@pytest.mark.parametrize(("generation", "plain", "fails"), [("v5p", 80, False), ("v5p", 90, True), ("v6e", 90, True)])
def test_slower_step_exceeds_the_limit(generation, plain, fails):
    ours = [cost(kernel=kernel, plain=plain) for kernel in ("forward", "gradient")]
    theirs = [dataclasses.replace(x, owner="splash", plain=100) for x in ours]
    made = checks(generation, [*ours, *theirs])
    forward = next(x for x in made if x.about == "forward, step without mask")
    assert forward.ratio == plain / 100
    assert (forward.ratio > forward.limit) == fails


def test_short_rows_are_compared_with_the_best_blocks_of_splash():
    shape = tpu_costs.SHORT[0]
    every = [cost(kernel=kernel, shape=x) for x in (LONG, shape) for kernel in ("forward", "gradient")]
    theirs = [dataclasses.replace(x, owner="splash") for x in every]
    faster = [dataclasses.replace(x, plain=50, diagonal=50) for x in theirs if x.shape == shape]
    made = [x for x in checks("v5e", [*every, *theirs, *faster]) if "512 rows" in x.about]
    assert len(made) == 2
    assert all(x.theirs == min(y.per_tile for y in faster) for x in made)
    assert all(x.limit == pytest.approx(1 / 1.1) for x in made)
