"""The command `ringjax` and its subcommands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import ringjax
from ringjax.cli.arguments import Parser

# name -> what it does; each is a module of this package with EXAMPLES, `add_arguments` and `run`
COMMANDS = {
    "plan": "what an attention will do on a ring: messages, memory, an estimate of time, what to mend",
    "draw": "pictures: who sees whom, what is covered, who computes what on a ring",
    "rehearse": "the real program for devices that are not there, made by their compiler, beside the plan",
    "doctor": "versions, devices, a check against the oracle, and a short measurement",
    "tune": "measures layouts, strategies and block sizes here, and keeps the fastest in a file",
}


def parser(command: str | None = None) -> Parser:
    """The parser; only the module of the command is imported (of all commands, if None)."""
    whole = Parser(
        prog="ringjax",
        description="Dilated (LongNet) attention for JAX: plan, draw, rehearse, check and tune.",
        epilog="Each command has examples: ringjax plan --help",
    )
    whole.add_argument("--version", action="version", version=f"ringjax {ringjax.__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if command in (None, name):
            module = importlib.import_module(f"ringjax.cli.{name}")
            sub.epilog, sub.formatter_class = module.EXAMPLES, argparse.RawDescriptionHelpFormatter
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print plain data instead of text")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows the name of the command, from `sys.argv` by default.

    Returns:
        0; 1 if a check failed; 2 if the input is wrong, after one line on standard error that says so.

    Example:
        >>> main(["plan", "--seq-len", "64K", "--layout", "spiral"])
        Traceback (most recent call last):
        ...
        SystemExit: 2
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in given if word in COMMANDS), "")
    options = parser(name).parse_args(given)
    module = importlib.import_module(f"ringjax.cli.{options.command}")
    try:
        return int(module.run(options))
    except (ValueError, NotImplementedError, OSError, ModuleNotFoundError) as error:
        line = " ".join(str(error).split()).rstrip(".")
        print(f"ringjax {options.command}: error: {line} (see ringjax {options.command} --help)", file=sys.stderr)
        return 2
