# SPDX-License-Identifier: Apache-2.0
"""Settings: one frozen record, from which flags, environment variables and `--print-config` follow."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NoReturn

from cecilia.errors import UsageError

ENV_PREFIX = "CECILIA_"
PROFILES = ("int8-v1", "bf16-v1", "f32", "latent-int8-v1", "latent-bf16-v1", "latent-f32")
WEIGHTS = ("auto", "mmap", "hugepage")
MOST_THREADS = 64  # what the kernels take; they are not imported to read a flag

Source = Literal["default", "env", "flag"]


def _text(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be printable text")
    return value


def _port(value: str) -> int:
    if not value.isdecimal() or int(value) > 65535:
        raise ValueError("must be a number from 0 to 65535 (0: any free port)")
    return int(value)


def _threads(value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MOST_THREADS:
        raise ValueError(f"must be auto or a number from 1 to {MOST_THREADS}")
    return int(value)


def _context(value: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,8})([kK]i?)?", value)
    if match is None:
        raise ValueError("must be a number of tokens such as 4096, 4K, 64k or 64Ki")
    return int(match[1]) * (1024 if match[2] else 1)


def _size(value: str) -> int:
    match = re.fullmatch(r"(0|[1-9][0-9]{0,12})(?:([kKmMgG])i?)?B?", value)
    if match is None:
        raise ValueError("must be a number of bytes such as 0, 512M or 2G")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[(match[2] or "").lower()]


def _profile(value: str) -> str:
    if value not in PROFILES:
        raise ValueError(f"must be one of {', '.join(PROFILES)}")
    return value


def _weights(value: str) -> str:
    if value not in WEIGHTS:
        raise ValueError(f"must be one of {', '.join(WEIGHTS)}")
    return value


def _yes_no(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return value == "yes"


def _setting(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of the server. None means: decided when the model is loaded."""

    host: str = _setting("127.0.0.1", _text, "address to listen on")
    port: int = _setting(9091, _port, "port to listen on; 0 takes a free one")
    model: str = _setting("models/smollm2-135m-instruct.l3r", _text, "model file (.l3r)")
    model_id: str | None = _setting(None, _text, "name of the model in the API; default: the file's name")
    context: int | None = _setting(
        None, _context, "window in tokens, e.g. 4096, 4K, 64Ki; default: the model's"
    )
    force_context: bool = _setting(
        False, _yes_no, "yes: take a window whose cache does not fit into memory now"
    )
    threads: int | None = _setting(None, _threads, "compute threads, or auto: one for each fast core")
    profile: str = _setting("int8-v1", _profile, f"cache recipe: {', '.join(PROFILES)}")
    cache_size: int | None = _setting(
        None,
        _size,
        "memory for earlier requests beyond a full window, e.g. 512M, 2G; default: half of the rest",
    )
    session_dir: str | None = _setting(None, _text, "directory of the snapshots of named sessions")
    weights: str = _setting(
        "auto", _weights, "where weights are: mmap, hugepage (moved to 2 MiB pages, faster) or auto"
    )


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The outcome of reading the command line and the environment."""

    config: Config
    sources: dict[str, Source]
    action: Literal["serve", "print_config", "check", "version"]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Name of setting -> value and where it comes from."""
        return {
            name: {"value": getattr(self.config, name), "source": source}
            for name, source in self.sources.items()
        }


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("usage", f"{message}; see --help")


def read_command_line(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> CommandLine:
    """Flag over environment over default; raises UsageError."""
    environ = os.environ if environ is None else environ
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError("unknown_flag", _did_you_mean(unknown[0], parser))
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for item in fields(Config):
        flag, env = _flag(item.name), ENV_PREFIX + item.name.upper()
        if (given := getattr(arguments, item.name)) is not None:
            values[item.name], sources[item.name] = _parse(item.metadata["parse"], given, flag), "flag"
        elif env in environ:
            values[item.name], sources[item.name] = _parse(item.metadata["parse"], environ[env], env), "env"
        else:
            sources[item.name] = "default"
    return CommandLine(Config(**values), sources, arguments.action)


def colour_wanted(terminal: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Colour is for terminals, unless NO_COLOR is set to anything (https://no-color.org)."""
    environ = os.environ if environ is None else environ
    return terminal and not environ.get("NO_COLOR")


def build_parser() -> argparse.ArgumentParser:
    """The parser, generated from `Config`."""
    parser = _Parser(
        prog="python -m server",
        description="Serve a model on an OpenAI-compatible port.",
        epilog=f"Each setting can also be given as an environment variable, e.g. {ENV_PREFIX}PORT=9091.",
        allow_abbrev=False,
    )
    for item in fields(Config):
        shown = "no" if item.default is False else item.default
        default = "" if shown in (None, MISSING) else f" (default: {shown})"
        parser.add_argument(_flag(item.name), metavar=item.name.upper(), help=item.metadata["help"] + default)
    actions = {
        "print_config": "print the settings and where each comes from, as JSON, and exit",
        "check": "check the machine and the model file, print what is wrong and how to mend it, and exit",
        "version": "print versions and exit",
    }
    for name, text in actions.items():
        parser.add_argument(_flag(name), dest="action", action="store_const", const=name, help=text)
    parser.set_defaults(action="serve")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(parse: Callable[[str], Any], value: str, name: str) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError("invalid_value", f"{name} {error}, got {value!r}") from None


def _did_you_mean(argument: str, parser: argparse.ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    near = difflib.get_close_matches(argument.partition("=")[0], flags, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    return f"unknown argument {argument!r}; {hint}"
