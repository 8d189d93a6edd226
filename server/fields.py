# SPDX-License-Identifier: Apache-2.0
"""Fields of JSON bodies: the right type and range, None when absent, or the 400 that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson

from server.errors import ApiError, invalid_value

MAX_DEPTH = 64

Body = dict[str, Any]

_Value = TypeVar("_Value", int, float)


def parse_json(raw: bytes) -> Body:
    """The body as an object. orjson refuses invalid UTF-8, lone surrogates, NaN and a depth over 1024."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "the request body must be a JSON object")
    _check_depth(value)
    return value


def boolean(body: Body, name: str, param: str | None = None) -> bool | None:
    """A truth value."""
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_value(f"{param or name} must be true or false", param or name)
    return value


def string(body: Body, name: str) -> str | None:
    """A string."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid_value(f"{name} must be a string", name)
    return value


def integer(body: Body, name: str, low: int, high: int | None = None) -> int | None:
    """An integer from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:  # a bool is an int to isinstance, and 1e30 arrives as a float
        raise invalid_value(f"{name} must be an integer", name)
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise invalid_value(f"{name} must be at least {low}{upper}, got {value}", name)
    return value


def number(
    body: Body, name: str, low: float, high: float, *, low_allowed: bool = True, param: str | None = None
) -> float | None:
    """A finite number from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise invalid_value(f"{name} must be a number", param or name)
    if not (low <= value <= high) or (value == low and not low_allowed):
        bound = "at least" if low_allowed else "over"
        text = f"{name} must be {bound} {low:g} and at most {high:g}, got {value:g}"
        raise invalid_value(text, param or name)
    return float(value)


def first(*values: _Value | None) -> _Value:
    """The first that is given; the last one is the default and always is."""
    return next(value for value in values if value is not None)


def _check_depth(value: Body) -> None:
    """Nesting is bounded without recursion: level by level over containers only."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            children.extend(item for item in items if isinstance(item, (dict, list)))
        if not children:
            return
        level = children
    raise ApiError(400, "invalid_json", f"the request body is nested deeper than {MAX_DEPTH} levels")
