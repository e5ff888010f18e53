"""One-line errors on standard error, in terms of command-line options."""

from __future__ import annotations

import re
import sys

from ringjax.cli.arguments import OPTIONS

# Arguments named in the errors of the library, and the options that set them.
_OPTIONS = {option["dest"]: f"--{name}" for name, option in OPTIONS.items()}
_OPTIONS |= dict.fromkeys(("pattern", "segment_lengths", "dilation_rates"), "--pattern")
_OPTIONS |= {"max_len": "--seq-len", "head_axis": "--head-shards", "topology": "--target", "name": "--target"}
_ARGUMENT = re.compile(r'`(\w+)(?:\[\d+\])?(?:="?(\w+)"?)?`')
_LONGEST = 1000  # characters per line


def in_options(text: str, **changes: str) -> str:
    """Replaces Python arguments in an error message by command-line options.

    Args:
        text: The message, with arguments in backticks.
        **changes: Options that differ for this command, by argument.

    Example:
        >>> in_options("`num_heads` must be a multiple of `num_kv_heads`, got 16 and 3.")
        '--heads must be a multiple of --kv-heads, got 16 and 3.'
        >>> in_options('`offsets` must be "mod" with `heads="split"`.')
        '--offsets must be "mod" with --branch-heads split.'
    """
    options = {**_OPTIONS, **changes}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        return found[0] if name not in options else options[name] + (f" {value}" if value else "")

    return _ARGUMENT.sub(option, text)


def one_line(text: str) -> str:
    r"""Returns a message on one line: no line breaks, no control characters, at most about 1,000 characters.

    Example:
        >>> one_line("two\n  lines and a bell \a.")
        'two lines and a bell \\x07'
    """
    line = " ".join(text.split()).rstrip(".")
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= _LONGEST else f"{line[:700]} ... {line[-200:]}"


def report(program: str, message: str) -> None:
    """Prints an error on standard error, if that is open."""
    if sys.stderr is not None:
        print(f"{program}: {message}", file=sys.stderr)


def usage_error(program: str, message: str) -> int:
    """Prints a usage error of a program and returns exit code 2."""
    report(program, f"error: {one_line(message)} (see {program} --help)")
    return 2
