"""Turns a dataclass into a command line, and invalid options into one-line errors.

    @dataclasses.dataclass(frozen=True)
    class Config:
        steps: int = flag(100, "optimizer steps", at_least(1))

    config = parse(Config, "description of the program", argv)    # --steps 200

Fields are int, float, str, bool (`--remat`, `--no-remat`) or tuples of int or str (`--rates 1,2,4`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

Config = TypeVar("Config")


class UserError(Exception):
    """Raised for invalid input of the user; the message is one line."""


class RunError(Exception):
    """Raised if a run cannot continue; the message is one line."""


class Rule(NamedTuple):
    """A condition on a value: a text that completes "must be ...", and a function that checks it."""

    text: str
    holds: Callable[[Any], bool]


def at_least(bound: float) -> Rule:
    return Rule(f"at least {bound}", lambda x: x >= bound)


def at_most(bound: float) -> Rule:
    return Rule(f"at most {bound}", lambda x: x <= bound)


def above(bound: float) -> Rule:
    return Rule(f"above {bound}", lambda x: x > bound)


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda x: x in choices)


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+):([0-9]{1,5})", text)
    return text == "" or (found is not None and 0 < int(found[2]) < 2**16)


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= x <= "\udfff" for x in text)  # surrogates represent bytes that could not be decoded


ADDRESS = Rule("HOST:PORT with a port from 1 to 65535", _is_address)
PATH = Rule("a name that this locale can decode (try LC_ALL=C.UTF-8)", _is_encodable)
NAMED_PATH = Rule("the name of a folder", lambda x: x != "")
_LARGEST = at_most(2**31 - 1)  # counts become 32-bit integers
_FINITE = Rule("a finite number", math.isfinite)


def flag(default: Any, help: str, *rules: Rule) -> Any:
    """Returns a config field with a default, a help text, and rules for its value (or each item of a tuple)."""
    return dataclasses.field(default=default, metadata={"help": help, "rules": rules})


def parse(config: type[Config], about: str, argv: Sequence[str] | None) -> Config:
    """Parses a command line into a config; raises `UserError` if an option is unknown or invalid."""
    parser = _Parser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        name, options = "--" + field.name.replace("_", "-"), {"help": field.metadata["help"], "default": field.default}
        kind = kinds[field.name]
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(name, type=_reader(kind), metavar=_shown(kind), **options)
    made = config(**vars(parser.parse_args(argv)))
    for field in dataclasses.fields(config):
        _check(f"--{field.name.replace('_', '-')}", getattr(made, field.name), field.metadata["rules"])
    return made


def _check(option: str, value: Any, rules: Sequence[Rule]) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        general = (_FINITE,) if isinstance(item, float) else ()
        if isinstance(item, int) and not any(rule.text.startswith("at most") for rule in rules):
            general = (_LARGEST,)
        for rule in (*general, *rules):
            if not rule.holds(item):
                raise UserError(f"{option} must be {rule.text}, got {item!r}")


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these types into `UserError`, for calls that validate user input."""
    try:
        yield
    except kinds as error:
        raise UserError(" ".join(str(error).split())) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def _reader(kind: Any) -> Any:
    """Returns a function that parses a value of this type."""
    if typing.get_origin(kind) is not tuple:
        return kind
    item = typing.get_args(kind)[0]

    def items(text: str) -> tuple[Any, ...]:
        return tuple(item(part) for part in text.split(",") if part)

    items.__name__ = f"comma-separated list of {item.__name__}"  # argparse shows it in its message
    return items


def _shown(kind: Any) -> str:
    return _reader(kind).__name__.split()[-1].upper() + ("," if typing.get_origin(kind) is tuple else "")
