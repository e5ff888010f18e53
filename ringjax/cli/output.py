"""Output of commands: text or JSON on standard output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any

from ringjax._src.planning import table

WIDTH, table_text = table.WIDTH, table.table_text  # as for plans
# ASCII replacements for the characters of tables and pictures.
_ASCII = str.maketrans("─━│┃…×░▒▓█", "--||.x.:+#") | dict.fromkeys(map(ord, "┌┐└┘├┤┬┴┼┏┓┗┛┡┩┢┪┳┻╇╈"), "+")


def emit(options: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON if requested."""
    text = json.dumps(data, indent=1) if options.json else text
    try:
        print(encodable(text, sys.stdout.encoding), flush=True)
    except OSError as error:
        raise _output_error(error) from None


def flush_stdout() -> None:
    """Flushes standard output while errors can still be reported.

    Raises:
        BrokenPipeError: If standard output is a closed pipe.
        ValueError: If standard output cannot be written for another reason.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _output_error(error) from None


def _output_error(error: OSError) -> OSError | ValueError:
    """Returns the error to raise; discards standard output so that Python does not report it again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    if isinstance(error, BrokenPipeError):
        return error
    return ValueError(f"standard output cannot be written: {error.strerror or error}")


def encodable(text: str, encoding: str | None) -> str:
    r"""Makes text encodable: draws frames in ASCII and escapes other characters if needed.

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


def seconds_text(seconds: float) -> str:
    """Formats a duration.

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
