# SPDX-License-Identifier: Apache-2.0
"""A machine with nothing on it: a folder with busybox, two device files and the kernel's /proc and /sys.

Programs are started in it by chroot, in a mount namespace of their own, so nothing stays mounted. A bundle
for another architecture runs under qemu, which is put beside the shell together with the libraries it needs,
in a folder where no program of the target finds them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cecilia.errors import CeciliaError
from portable.run import run
from portable.target import Target, native

APPLETS = (
    "cut",
    "gzip",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "readlink",
    "rm",
    "sh",
    "sha256sum",
    "tail",
    "tar",
    "uname",
    "xargs",
)
CPU = "cortex-a76"
_EMULATOR = "machine"
_SETUP = """\
root=$1 bundle=$2 path=$PATH; shift 2
PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot=$(command -v chroot)
for device in null urandom; do mount --bind /dev/$device "$root/dev/$device"; done
mount --bind "$bundle" "$root/opt/bundle"
mount -o remount,ro,bind "$root/opt/bundle"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
PATH=$path exec $chroot "$root" "$@"
"""


class Machine:
    """An empty machine below `root`, on which a bundle lies read-only at /opt/bundle."""

    BUNDLE = "/opt/bundle"

    def __init__(self, root: Path, target: Target, *, busybox: Path) -> None:
        if os.geteuid() != 0:
            raise CeciliaError("needs_root", "only root may chroot: run it with sudo")
        self.root = root
        self._target = target
        for folder in ("bin", "dev", "home", "opt/bundle", "proc", "sys", "tmp", "usr/bin"):
            (root / folder).mkdir(parents=True)
        for device in ("null", "urandom"):
            (root / "dev" / device).touch()
        shutil.copy(busybox, root / "bin/busybox")
        for applet in APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
        self.runner = "" if target.native else self._add_emulator()
        self._environment = {"PATH": "/bin", "HOME": "/home", "CECILIA_RUNNER": self.runner}

    def _add_emulator(self) -> str:
        """Copy qemu in; returns the command that runs a program of the target."""
        program = shutil.which(f"qemu-{self._target.name}") or shutil.which(
            f"qemu-{self._target.name}-static"
        )
        if program is None:
            raise CeciliaError(
                "command_missing", f"qemu-{self._target.name} is not installed: apt install qemu-user"
            )
        folder = self.root / _EMULATOR
        folder.mkdir()
        shutil.copy(program, folder / "qemu")
        listed = run(["ldd", program]) if program.endswith(self._target.name) else ""
        # `libz.so.1 => /lib/.../libz.so.1 (0x...)`, and the loader by its path alone.
        libraries = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
        for library in libraries:
            shutil.copy(library, folder)
        command = f"/{_EMULATOR}/qemu -cpu {CPU}"
        loader = native().loader
        return f"/{_EMULATOR}/{loader} --library-path /{_EMULATOR} {command}" if libraries else command

    def start(
        self,
        bundle: Path,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        through: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a command of the machine, by a program of the real one if `through` names it.

        The process that is returned is the command's own.
        """
        return subprocess.Popen(
            [
                *(shutil.which(word) or word for word in (*through, "unshare")),
                "--mount",
                "/bin/sh",
                "-ec",
                _SETUP,
                "sh",
                self.root,
                bundle,
                *command,
            ],
            env={**self._environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        bundle: Path,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        through: Sequence[str] = (),
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with self.start(bundle, command, environment, through=through) as process:
            try:
                out, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise CeciliaError("too_slow", f"{' '.join(command[:3])} took over {timeout:.0f} s") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)
