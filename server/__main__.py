# SPDX-License-Identifier: Apache-2.0
"""`python -m server`: reads the command line, runs one action, ends with an exit code.

0 ok, 1 runtime, 2 usage, 3 model file, 4 not enough memory, 5 port, 6 device.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cecilia
from cecilia.config import set_openmp_environment
from cecilia.errors import CeciliaError, ModelFileError
from server import log
from server.config import CommandLine, Config, colour_wanted, read_command_line

if TYPE_CHECKING:
    from server.service import Progress
    from server.worker import Engine


def main() -> int:
    """The exit code."""
    try:
        command = read_command_line(sys.argv[1:])
        # Before anything pulls in numpy or a kernel, whose thread libraries read their settings once.
        set_openmp_environment()
        if command.action == "print_config":
            print(json.dumps(_described(command), indent=2))
        elif command.action == "version":
            print(_version())
        elif command.action == "check":
            from server.check import check

            return check(command.config, print, colour=colour_wanted(sys.stdout.isatty()))
        else:
            _serve(command.config)
    except CeciliaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 0
    return 0


def _described(command: CommandLine) -> dict[str, Any]:
    """The settings and, if the model file is there, what the attention cache takes with each recipe."""
    described: dict[str, Any] = dict(command.describe())
    config = command.config
    if Path(config.model).is_file():
        from cecilia.engine.window import cache_costs

        described["cache"] = cache_costs(config.model, config.context)
    return described


def _serve(config: Config) -> None:
    from server.service import run

    log.configure()
    if not Path(config.model).is_file():
        text = f"no model file {config.model}: name one with --model, or get the default with `make run`"
        raise ModelFileError("model_not_found", text)
    run(config, load_engine)


def load_engine(config: Config, progress: Progress) -> Engine:
    """Load the configured model; called on the engine thread.

    The engine is imported here, not above: the port is bound and /health answers before numpy and the kernels
    are read from a slow card.
    """
    from cecilia.engine.load import load

    return load(
        config.model,
        profile=config.profile,
        weights=config.weights,
        context=config.context,
        force_context=config.force_context,
        threads=config.threads,
        cache_bytes=config.cache_size,
        progress=progress,
    )


def _version() -> str:
    from cecilia._kernels import isa

    facts = {
        "cecilia": cecilia.__version__,
        "kernels": isa.name(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }
    return "\n".join(f"{name} {value}" for name, value in facts.items())


if __name__ == "__main__":
    sys.exit(main())
