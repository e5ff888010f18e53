"""`ringjax draw`: draws the mask and coverage of a pattern, and the schedule of a ring."""

from __future__ import annotations

import argparse
import io
import pathlib
import string
from typing import Any

import numpy as np

from ringjax._src.comm.layout import layout_named
from ringjax.cli.arguments import PlanOptions, add_job_arguments, job_of
from ringjax.cli.files import check_output, write_output
from ringjax.cli.output import emit
from ringjax.cli.pictures import Schedule, coverage_of, mask_of, schedule_of

EXAMPLES = """examples:
  ringjax draw mask --seq-len 64 --pattern 8/1,32/2,T/4 --heads 4 --causal -o mask.png
  ringjax draw coverage --seq-len 64K --pattern 2K/1,8K/4,T/16 --heads 8 -o coverage.svg
  ringjax draw ring --seq-len 64K --pattern 2K/1,16K/4,T/16 --ring 8 --causal -o ring.png
  ringjax draw mask --seq-len 32 --pattern 8/1,T/4 --heads 2 --causal --ascii
"""
_COLORS = ("#ffffff", "#1b4f8a", "#d98c21", "#4f9d69", "#a23b72", "#7a7a7a", "#c95d63", "#5b8e7d", "#8d6a9f")
_SHADES = " ░▒▓█"
_DIGITS = "." + string.digits[1:] + string.ascii_lowercase  # symbols of branches in text
_MASKS = 4  # heads shown in a mask picture
_POSITIONS = 64  # shown in a coverage picture
_MOST_HEADS = 256  # shown in a coverage picture
_MOST_SEGMENTS = 2**16  # over all heads; they are processed one by one


def draw(what: str, job: PlanOptions, path: pathlib.Path) -> None:
    """Draws a picture to a PNG or SVG file.

    Args:
        what: ``"mask"``, ``"coverage"`` or ``"ring"``.
        job: The attention to draw.
        path: The file; its suffix selects the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If the attention is too large to draw, or `path` is not a writable .png or .svg file.
    """
    check_output(path, (".png", ".svg"))
    _check(what, job)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only pictures need it
    except ModuleNotFoundError as error:
        remedy = "pip install '.[plot]' in a clone of ringjax, or use --ascii"
        raise ModuleNotFoundError(f"pictures need matplotlib: {remedy}") from error
    figure = Figure(layout="constrained", dpi=150)
    {"mask": _draw_mask, "coverage": _draw_coverage, "ring": _draw_ring}[what](figure, job)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:])
    write_output(path, drawn.getvalue())


def _check(what: str, job: PlanOptions) -> None:
    """Raises `ValueError` if the attention is invalid or too large to draw."""
    if what == "ring" and not 2 <= job.ring_size <= 64:
        raise ValueError(f"--ring must be from 2 to 64 to draw a ring, got {job.ring_size}")
    if what == "coverage" and job.kv_heads > _MOST_HEADS:
        raise ValueError(
            f"--kv-heads (by default --heads) must be at most {_MOST_HEADS} to draw the coverage, got {job.kv_heads}"
        )
    for branch in job.plan().branches:
        segments = -(-job.seq_len // branch.segment_length) * job.kv_heads
        if what == "ring" and segments > _MOST_SEGMENTS:
            raise ValueError(
                f"--pattern must have longer segments to draw a ring of {job.seq_len} positions: branch "
                f"{branch.segment_length}/{branch.rate} has {segments:,} over all heads, limit {_MOST_SEGMENTS:,}"
            )


def in_text(what: str, job: PlanOptions) -> str:
    """Returns a picture as text for a terminal.

    Example:
        >>> print(in_text("mask", PlanOptions(4, num_heads=1, pattern_text="2/1,4/2", is_causal=True)))
        head 0 (1: 2/1, 2: 4/2)
        1 . . .
        1 1 . .
        2 . 1 .
        . . 1 1
    """
    _check(what, job)
    return {"mask": _mask_text, "coverage": _coverage_text, "ring": _ring_text}[what](job)


def _draw_mask(figure: Any, job: PlanOptions) -> None:  # noqa: ANN401 - matplotlib is optional
    from matplotlib.colors import ListedColormap  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    heads, branches = min(job.num_heads, _MASKS), job.branches
    masks = mask_of(job, heads)
    figure.set_size_inches(3.1 * heads + 0.4, 4.1)
    panels = figure.subplots(1, heads, squeeze=False, sharey=True)[0]
    shades = [_COLORS[1 + i % 8] for i in range(len(branches))]
    colors = ListedColormap([_COLORS[0], *shades])
    for head, panel in enumerate(panels):
        panel.imshow(masks[head], cmap=colors, vmin=-0.5, vmax=len(branches) + 0.5, interpolation="nearest")
        panel.set_title(f"head {head}", fontsize=11)
        panel.set_xlabel("key position")
    panels[0].set_ylabel("query position")
    labels = [f"segments of {branch.segment_length}, {_every(branch.rate)}" for branch in branches]
    keys = [Patch(color=color, label=label) for color, label in zip(shades, labels, strict=True)]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), heads + 1), frameon=False, fontsize=10)
    causal = "causal " if job.is_causal else ""
    title = f"Which keys each query attends to: {causal}dilated attention, {job.seq_len} positions"
    figure.suptitle(title, fontsize=12)


def _every(rate: int) -> str:
    if rate == 1:
        return "every row"
    teens = 10 <= rate % 100 <= 20
    return f"every {rate}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(rate % 10, 'th')} row"


def _draw_coverage(figure: Any, job: PlanOptions) -> None:  # noqa: ANN401
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    table, reach = coverage_of(job, _POSITIONS)
    most = len(reach)
    figure.set_size_inches(11, 1.9 + max(2.0, 0.16 * len(table)))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    blues = ["#ffffff", "#bcd4ea", "#7fb0db", "#3f83c0", "#1b4f8a", "#0b2d57"]
    colors = ListedColormap([blues[min(i, 5)] for i in range(most + 1)])
    shown = left.imshow(table, cmap=colors, vmin=-0.5, vmax=most + 0.5, aspect="auto", interpolation="nearest")
    title = f"Branches that select a position (first {table.shape[1]})"
    left.set(xlabel="position", ylabel="key/value head", title=title)
    left.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(shown, ax=left, ticks=range(most + 1), pad=0.02)
    bar.ax.tick_params(labelsize=9)
    bar.set_label("branches", fontsize=9)
    for i, branch in enumerate(reach):
        right.barh(i, branch.distance, height=0.62, color=_COLORS[1 + i % 8])
        text = "every key" if branch.density == 1 else f"1 key in {round(1 / branch.density)}"
        right.text(1.25, i, text, va="center", color="white", fontsize=9, fontweight="bold")
    right.set_yticks(range(len(reach)), [branch.name for branch in reach])
    right.set_xscale("log", base=2)
    right.set(xlim=(1, 2 * max(branch.distance for branch in reach)), xlabel="maximum distance between query and key")
    right.set(ylabel="segment / rate", title="Reach of a query and key density")
    right.invert_yaxis()
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_coverage_line(job), fontsize=12)


def _coverage_line(job: PlanOptions) -> str:
    found = job.coverage(2**22)
    return f"{found.share:.1%} of (position, head) pairs covered; reach {found.reach:,} of {job.seq_len:,} positions"


def _draw_ring(figure: Any, job: PlanOptions) -> None:  # noqa: ANN401
    from matplotlib import colormaps  # noqa: PLC0415

    schedules = [schedule_of(branch) for branch in job.plan().branches]
    widths = [max(1.9, 0.8 + 0.42 * s.source.shape[1]) for s in schedules]
    figure.set_size_inches(2.4 + sum(widths), 2.0 + max(2.2, 0.34 * job.ring_size))
    panels = figure.subplots(1, 1 + len(schedules), width_ratios=(1.5, *widths), squeeze=False)[0]
    turbo = colormaps["turbo"](np.linspace(0.12, 0.88, job.ring_size))
    colors = np.asarray(turbo)[:, :3] * 0.62 + 0.38  # (devices, 3), light enough for dark text
    _draw_layout(panels[0], job, colors)
    for panel, schedule in zip(panels[1:], schedules, strict=True):
        _draw_schedule(panel, schedule, colors)
    causal = "causal, " if job.is_causal else ""
    title = f"{job.seq_len:,} positions over a ring of {job.ring_size} devices ({causal}{job.layout})"
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(
        "Colors and numbers: the device that the keys came from, or the heads that a device has after an exchange.\n"
        "Full color: most work; pale: less; white: none. Blue lines separate devices that share no segment.",
        fontsize=9,
    )


def _draw_layout(panel: Any, job: PlanOptions, colors: np.ndarray) -> None:  # noqa: ANN401
    """Draws the chunks of the sequence that each device holds."""
    chunks = _chunks(job)
    panel.imshow(np.repeat(colors[:, None], chunks.shape[1], axis=1), aspect="auto", interpolation="nearest")
    for (device, nth), chunk in np.ndenumerate(chunks):
        if job.ring_size <= 32:
            panel.text(nth, device, str(chunk), ha="center", va="center", fontsize=8)
    panel.set_xticks([])
    panel.set_xlabel("chunk index", fontsize=9)
    panel.set_title("chunks held", fontsize=10)
    panel.set_ylabel("device")
    panel.yaxis.get_major_locator().set_params(integer=True)


def _draw_schedule(panel: Any, schedule: Schedule, colors: np.ndarray) -> None:  # noqa: ANN401
    share = (schedule.work / max(schedule.work.max(), 1.0))[..., None]
    strength = np.where(share > 0, 0.25 + 0.75 * share, 0.0)
    cells = strength * colors[schedule.source] + (1 - strength)
    panel.imshow(cells, aspect="auto", interpolation="nearest")
    if schedule.ring_devices <= 16 and len(cells) <= 32:
        for (device, step), label in np.ndenumerate(schedule.labels):
            color = "black" if share[device, step, 0] else "#b0b0b0"
            panel.text(step, device, label, ha="center", va="center", fontsize=8, color=color)
    for device in range(schedule.ring_devices, len(cells), schedule.ring_devices):
        if schedule.ring_devices > 1:
            panel.axhline(device - 0.5, color="#1b4f8a", linewidth=2)
    panel.set_title(f"{schedule.name}\n{schedule.where}", fontsize=10)
    panel.set_xticks([])
    panel.set_xlabel(schedule.about.replace(": ", ":\n").replace(", ", ",\n"), fontsize=9)
    panel.set_yticks([])


def _chunks(job: PlanOptions) -> np.ndarray:
    """Returns the indices of the chunks held by each device, (devices, chunks per device)."""
    return np.array(layout_named(job.layout).order(job.ring_size)).reshape(job.ring_size, -1)


def _mask_text(job: PlanOptions) -> str:
    legend = ", ".join(f"{_DIGITS[i]}: {b.segment_length}/{b.rate}" for i, b in enumerate(job.branches, 1))
    lines = []
    for head, mask in enumerate(mask_of(job, min(job.num_heads, _MASKS))):
        lines += [f"head {head} ({legend})", *(" ".join(_DIGITS[x] for x in row) for row in mask), ""]
    return "\n".join(lines[:-1])


def _coverage_text(job: PlanOptions) -> str:
    table, reach = coverage_of(job, _POSITIONS)
    lines = [_coverage_line(job), "", "branches that select a position, by key/value head:"]
    lines += [f"{head:3d} " + "".join(_DIGITS[x] for x in row) for head, row in enumerate(table)]
    bars = [f"{x.name:>16} {'#' * x.distance.bit_length()} 1 key in {round(1 / x.density)}" for x in reach]
    return "\n".join([*lines, "", *bars])


def _ring_text(job: PlanOptions) -> str:
    lines = ["device: chunks held"]
    lines += [f"{device:6d}: {' '.join(map(str, held))}" for device, held in enumerate(_chunks(job))]
    for s in map(schedule_of, job.plan().branches):
        shown = "heads of each device" if s.exchange_devices > 1 else "source of the keys in each step"
        lines += ["", f"{s.name}: {s.where}; {s.about}; {shown}, and relative work:"]
        shade = np.ceil(s.work / max(s.work.max(), 1.0) * (len(_SHADES) - 1)).astype(int)
        gap = " " if s.exchange_devices > 1 else ""
        for device, row in enumerate(s.labels):
            cells = (f"{label:>3}{gap}{_SHADES[shade[device, step]]}" for step, label in enumerate(row))
            lines.append(f"{device:6d}: {' '.join(cells)}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `ringjax draw`."""
    parser.add_argument("what", choices=("mask", "coverage", "ring"), help="picture to draw")
    add_job_arguments(parser, seq_len="64", ring_size="8", num_heads="4", pattern_text="8/1,32/2,T/4")
    about = ".png or .svg file (ringjax-WHAT.png)"
    parser.add_argument("-o", "--output", type=pathlib.Path, metavar="FILE", help=about)
    parser.add_argument("--ascii", action="store_true", help="print as text instead")


def run(options: argparse.Namespace) -> int:
    """Runs `ringjax draw`."""
    job = job_of(options)
    if options.ascii and options.output:
        raise ValueError(f"--output must not be given with --ascii, got {str(options.output)!r}")
    data = {"command": "draw", "what": options.what}
    if options.ascii:
        text = in_text(options.what, job)
        emit(options, {**data, "text": text}, text)
    else:
        path = options.output or pathlib.Path(f"ringjax-{options.what}.png")
        draw(options.what, job, path)
        emit(options, {**data, "file": str(path)}, f"Saved {path}.")
    return 0
