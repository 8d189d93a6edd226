# SPDX-License-Identifier: Apache-2.0
"""Rounds of the side-by-side bench: which of them count, and a file of them that several runs fill."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cecilia.errors import UsageError
from tools.bench.engines import Speeds

LEAST_PROBE = 0.7


@dataclass
class Round:
    """One turn of all engines: GB/s of the probe before it, tokens/s of each engine by test."""

    probe: float
    speeds: dict[str, Speeds] = field(default_factory=dict)


def kept(rounds: Sequence[Round]) -> list[Round]:
    """The rounds whose probe reached 70 % of the median one."""
    limit = LEAST_PROBE * statistics.median(r.probe for r in rounds)
    return [r for r in rounds if r.probe >= limit]


def earlier(path: Path | None, key: str, like: Round) -> list[Round]:
    """The rounds that a file has under a key; none when there is no file.

    Raises UsageError `other_rounds` when they are not of the same engines and tests as `like`.
    """
    found = [Round(**told) for told in _read(path).get(key, [])]
    if any(_tests(r) != _tests(like) for r in found):
        raise UsageError("other_rounds", f"{path} has rounds of other engines or tests for {key}")
    return found


def keep(path: Path, key: str, rounds: Sequence[Round]) -> None:
    """Put a key's rounds into a file."""
    told = {**_read(path), key: [asdict(r) for r in rounds]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _read(path: Path | None) -> dict[str, list[dict[str, float | dict[str, Speeds]]]]:
    if path is None or not path.exists():
        return {}
    found: dict[str, list[dict[str, float | dict[str, Speeds]]]] = json.loads(
        path.read_text(encoding="utf-8")
    )
    return found


def _tests(turn: Round) -> dict[str, set[str]]:
    return {name: set(speeds) for name, speeds in turn.speeds.items()}
