"""How commands speak: text or JSON on standard output."""

from __future__ import annotations

import argparse
import io
import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 120


def emit(options: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON if that was asked for."""
    print(json.dumps(data, indent=1) if options.json else text)


def table_text(table: Table) -> str:
    """A table as text, at most 120 columns wide."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
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
