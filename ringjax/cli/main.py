"""The command `ringjax` and its subcommands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import jax

import ringjax
from ringjax.cli.arguments import Parser
from ringjax.cli.errors import in_options, report, usage_error
from ringjax.cli.output import flush_stdout

# name -> what it does; each is a module of this package with EXAMPLES, `add_arguments` and `run`
COMMANDS = {
    "plan": "what an attention will do on a ring: messages, memory, an estimate of time, what to mend",
    "draw": "pictures: who sees whom, what is covered, who computes what on a ring",
    "aot": "the real program for devices that are not there, made by their compiler, beside the plan",
    "doctor": "versions, devices, a check against the oracle, and a short measurement",
    "tune": "measures layouts, strategies and block sizes here, and keeps the fastest in a file",
}


def parser(command: str | None = None) -> Parser:
    """The parser; only the module of the command is imported (of all commands, if None)."""
    whole = Parser(
        prog="ringjax",
        description="Dilated (LongNet) attention for JAX: plan, draw, compile ahead of time, diagnose and tune.",
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
        The exit code: 0; 1 if a check failed; 2 if the input is wrong or the output cannot be written, after one line
        on standard error; 130 if interrupted, after one line; 141 if the reader of standard output is gone.

    Example:
        >>> main(["plan", "--seq-len", "64K", "--layout", "spiral"])
        2
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in given if word in COMMANDS), "")
    program = f"ringjax {name}".strip()
    if sys.stdout is None:
        return usage_error(program, "standard output is closed")
    try:
        code = _run(name, given)
        flush_stdout()
    except KeyboardInterrupt:
        report(program, "interrupted")
        return 130
    except BrokenPipeError:  # as in `ringjax plan | head -1`: what a program returns that the signal ends
        return 141
    except MemoryError:
        return usage_error(program, "there is not enough memory: choose a smaller --seq-len, --heads or --ring")
    except (ValueError, NotImplementedError, OSError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        changes = {"ring_size": "--target"} if name == "aot" else {}
        return usage_error(program, in_options(str(error), **changes))
    return code


def _run(name: str, given: list[str]) -> int:
    try:
        options = parser(name).parse_args(given)
    except SystemExit as end:  # --help, --version, or an error that was reported
        return int(end.code or 0)
    module = importlib.import_module(f"ringjax.cli.{options.command}")
    return int(module.run(options))
