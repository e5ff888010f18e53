"""The command `ringjax` and its subcommands."""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

import ringjax
from ringjax.cli.errors import in_options, report, usage_error
from ringjax.cli.output import flush_stdout

# name -> help text; each is a module of this package with EXAMPLES, `add_arguments` and `run`
COMMANDS = {
    "plan": "predict messages, memory and time of an attention call, with warnings and fixes",
    "draw": "draw the mask and coverage of a pattern, or the schedule of a ring",
    "aot": "compile ahead of time for a TPU or GPU topology and compare with the plan",
    "doctor": "report versions and devices, check results against the reference, and measure speed",
    "tune": "measure layouts, strategies and block sizes on this machine, and save the fastest",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors on one line and suggests options for misspelled ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # noqa: ANN401
        """Parses arguments; reports unknown ones here, where the options of the subcommand are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            close = [difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7) for word in words]
            hint = f"; did you mean {' and '.join(itertools.chain(*close))}?" if any(close) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the error with a pointer to `--help` and exits."""
        self.exit(usage_error(self.prog, message))


def parser(command: str | None = None) -> Parser:
    """Returns the parser, with the options of one command, or of all commands if None."""
    whole = Parser(
        prog="ringjax",
        description="Dilated (LongNet) attention for JAX: plan, draw, compile ahead of time, diagnose and tune.",
        epilog="For examples, see the help of a command: ringjax plan --help",
    )
    whole.add_argument("--version", action="version", version=f"ringjax {ringjax.__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if command in (None, name):
            module = importlib.import_module(f"ringjax.cli.{name}")
            sub.epilog, sub.formatter_class = module.EXAMPLES, argparse.RawDescriptionHelpFormatter
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print JSON instead of text")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The command-line arguments, by default those of `sys.argv`.

    Returns:
        The exit code: 0; 1 if a check failed; 2 if the input is wrong or the output cannot be written, after one line
        on standard error; 130 if interrupted, after one line; 141 if standard output is a closed pipe.

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
    except BrokenPipeError:  # as in `ringjax plan | head -1`: the exit code of SIGPIPE
        return 141
    except MemoryError:
        return usage_error(program, "out of memory: choose a smaller --seq-len, --heads or --ring")
    except (ValueError, NotImplementedError, OSError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        changes = {"ring_size": "--target"} if name == "aot" else {}
        return usage_error(program, in_options(str(error), **changes))
    return code


def _run(name: str, given: list[str]) -> int:
    try:
        options = parser(name).parse_args(given)
    except SystemExit as end:  # --help, --version, or an error that has been reported
        return int(end.code or 0)
    module = importlib.import_module(f"ringjax.cli.{options.command}")
    return int(module.run(options))
