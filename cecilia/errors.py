# SPDX-License-Identifier: Apache-2.0
"""Every error Cecilia raises on purpose: a stable code, one line of text, an exit code."""

from __future__ import annotations


class CeciliaError(Exception):
    """An expected failure.

    `code` is stable and machine-readable (`snake_case`); `message` is one line holding the facts.
    `exit_code` is what a command-line program returns when the error ends it.
    """

    exit_code = 1

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class UsageError(CeciliaError):
    """A flag, a configuration value or a call that cannot be honoured."""

    exit_code = 2


class ModelFileError(CeciliaError):
    """A model file that is missing, damaged, foreign or outside what an architecture supports."""

    exit_code = 3


class MemoryLimitError(CeciliaError):
    """Work refused, or ended, because the memory for it is not there."""

    exit_code = 4


class PortError(CeciliaError):
    """The address to listen on cannot be had."""

    exit_code = 5


class DeviceError(CeciliaError):
    """A device, or an instruction set, that was asked for by name and is not there."""

    exit_code = 6


class RequestError(CeciliaError):
    """A request that is well-formed JSON but cannot be served; `param` names the field at fault."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, facts: dict[str, int] | None = None
    ) -> None:
        super().__init__(code, message)
        self.param = param
        self.facts = facts or {}
