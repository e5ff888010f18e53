"""A dataclass as a command line, and mistakes of its user as one clear line.

    @dataclasses.dataclass(frozen=True)
    class Config:
        steps: int = flag(100, "optimiser steps")

    config = parse(Config, "what the program does", argv)    # --steps 200

Fields are int, float, str, bool (`--remat`, `--no-remat`) or tuples of int or str (`--rates 1,2,4`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

Config = TypeVar("Config")


class UserError(Exception):
    """Something that the user asked for cannot be done; the text is one line that says what and why."""


class RunError(Exception):
    """A run that cannot go on; the text is one line that says why."""


def flag(default: Any, help: str, least: float | None = None) -> Any:
    """A field of a config: its default, the sentence that `--help` shows, and the least that it may be."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least})


def parse(config: type[Config], about: str, argv: Sequence[str] | None) -> Config:
    """The config that a command line asks for; `UserError` if it makes no sense."""
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
        value, least = getattr(made, field.name), field.metadata["least"]
        if least is not None and not value >= least:
            raise UserError(f"--{field.name.replace('_', '-')} must be at least {least}, got {value}")
    return made


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds into `UserError`: for calls that check what a user gave."""
    try:
        yield
    except kinds as error:
        raise UserError(" ".join(str(error).split())) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")


def _reader(kind: Any) -> Any:
    """What reads a value of this type from text."""
    if typing.get_origin(kind) is not tuple:
        return kind
    item = typing.get_args(kind)[0]

    def items(text: str) -> tuple[Any, ...]:
        return tuple(item(part) for part in text.split(",") if part)

    items.__name__ = f"comma-separated list of {item.__name__}"  # argparse puts it in its message
    return items


def _shown(kind: Any) -> str:
    return _reader(kind).__name__.split()[-1].upper() + ("," if typing.get_origin(kind) is tuple else "")
