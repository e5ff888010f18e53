"""What commands print: text or JSON on standard output."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 120
# What tables and pictures are drawn with, for terminals that have no such characters.
_ASCII = str.maketrans("─━│┃…×░▒▓█", "--||.x.:+#") | dict.fromkeys(map(ord, "┌┐└┘├┤┬┴┼┏┓┗┛┡┩┢┪┳┻╇╈"), "+")


def emit(options: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON if that was asked for."""
    text = json.dumps(data, indent=1) if options.json else text
    try:
        print(encodable(text, sys.stdout.encoding))
    except OSError as error:
        raise _output_error(error) from None
    flush_stdout()


def flush_stdout() -> None:
    """Flushes standard output, while an error can still be reported.

    Raises:
        BrokenPipeError: If the reader is gone.
        ValueError: If standard output cannot be written for another reason.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _output_error(error) from None


def _output_error(error: OSError) -> OSError | ValueError:
    """The error to raise for one of standard output, which is discarded so that Python does not report it again."""
    discard_stdout()
    if isinstance(error, BrokenPipeError):
        return error
    return ValueError(f"standard output cannot be written: {error.strerror or error}")


def discard_stdout() -> None:
    """Sends what is left in the buffer of standard output, and all that follows, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def encodable(text: str, encoding: str | None) -> str:
    r"""Returns a text that an encoding can express: with ASCII frames, and escapes for what is left.

    Example:
        >>> encodable("┃ 1.5 │ \udcff", "ascii")
        '| 1.5 | \\udcff'
    """
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text if encoding.lower().startswith("utf") else text.translate(_ASCII)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def table_text(table: Table) -> str:
    """A table as text, at most 120 columns wide."""
    out = io.StringIO()
    # cells may hold what the user typed, which is no markup
    console = Console(file=out, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def seconds_text(seconds: float) -> str:
    """A time.

    Example:
        >>> seconds_text(0.00123), seconds_text(12.5)
        ('1.23 ms', '12.5 s')
    """
    if math.isnan(seconds):
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us" if seconds else "0"
