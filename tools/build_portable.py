# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.build_portable`: build the bundle that runs on a board by itself.

Needs a Debian 12 (or another system whose sources have its Python 3.11) with apt, dpkg, pip and a compiler,
but no root; for another architecture than its own the cross compiler. What is built stands in
`portable/dist/`: a folder, the same as a .tar.xz, and the same as one self-extracting .run file.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cecilia.errors import CeciliaError, UsageError
from portable import wheels
from portable.bundle import Built, Order, build
from portable.run import run
from portable.target import target

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit codes are those of cecilia.errors."""
    args = _parser().parse_args(argv)
    try:
        if args.lock:
            for group in ("core", "rknnlite", "build"):
                print(wheels.write_lock(group))
            return 0
        order = Order(
            target=target(args.arch),
            rknnlite=args.with_rknnlite,
            epoch=_commit_time() if args.epoch is None else args.epoch,
            output=args.output.resolve(),
            work=args.work.resolve(),
        )
        _tell(build(order, _clock()))
    except CeciliaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.build_portable", description="Build the portable bundle."
    )
    parser.add_argument(
        "--arch", default=platform.machine(), help="x86_64 or aarch64; default: this machine's"
    )
    parser.add_argument(
        "--with-rknnlite",
        action="store_true",
        help="put rknn-toolkit-lite2 in (aarch64; it states no licence)",
    )
    parser.add_argument(
        "--epoch", type=int, metavar="SECONDS", help="every time stamp inside; default: that of the commit"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "portable/dist", help="default: portable/dist")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/portable", help="downloads; default: build/portable"
    )
    parser.add_argument(
        "--lock", action="store_true", help="pin the newest wheels in portable/locks, build nothing"
    )
    return parser


def _commit_time() -> int:
    try:
        return int(run(["git", "-C", ROOT, "log", "-1", "--format=%ct"]))
    except CeciliaError as error:
        raise UsageError("no_epoch", f"not a git checkout, so name a time with --epoch: {error}") from None


def _clock() -> Callable[[str], None]:
    started = time.monotonic()

    def say(step: str) -> None:
        print(f"bundle: {time.monotonic() - started:5.1f} s  {step}", file=sys.stderr, flush=True)

    return say


def _tell(built: Built) -> None:
    print(f"{built.folder}  {built.folder_bytes / 1e6:.1f} MB")
    for path, sha256 in (
        (built.tar_xz, built.tar_xz_sha256),
        (built.single, built.single_sha256),
    ):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB  sha256 {sha256}")


if __name__ == "__main__":
    sys.exit(main())
