# SPDX-License-Identifier: Apache-2.0
"""The C runner, natively and, cross compiled, under an emulator.

Each instruction set is compared with scalar, and scalar with itself on the other machine.
"""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cecilia._kernels import isa

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "cecilia" / "_kernels" / "c"
CROSS, OBJDUMP, EMULATOR = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump", "qemu-aarch64"
MISSING = [tool for tool in (CROSS, OBJDUMP, EMULATOR) if shutil.which(tool) is None]
needs_cross = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}")
native_is_x86 = platform.machine() == "x86_64"


@dataclass(frozen=True)
class Runner:
    """A linked runner, and the objects of the kernels in it."""

    program: Path
    objects: list[Path]

    def run(self, *arguments: str, cpu: str | None = None) -> subprocess.CompletedProcess[str]:
        prefix = [EMULATOR, "-cpu", cpu] if cpu else []
        command = [*prefix, str(self.program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def flags() -> list[str]:
    """The compiler flags of setup.py, of which there is no second copy; OpenMP is for the Cython modules."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS":
            found: list[str] = ast.literal_eval(node.value)
            return [*(flag for flag in found if flag != "-fopenmp"), "-O3", "-g0", f"-I{KERNELS}"]
    raise LookupError("setup.py has no FLAGS")


def build(compiler: str, folder: Path, *link: str) -> Runner:
    common = flags()

    def compiled(source: Path) -> Path:
        target = folder / f"{source.parent.parent.name}_{source.stem}.o"
        subprocess.run([compiler, *common, "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(compiled, sorted(KERNELS.glob("*.c"))))
        cases = list(pool.map(compiled, sorted(Path(__file__).parent.glob("*.c"))))
    program = folder / "runner"
    subprocess.run([compiler, *link, *map(str, kernels + cases), "-lm", "-o", str(program)], check=True)
    return Runner(program, kernels)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return build("gcc" if shutil.which("gcc") else "cc", tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Static, so that the emulator needs no libraries of the other machine."""
    return build(CROSS, tmp_path_factory.mktemp("aarch64"), "-static")


def differing(output: str) -> list[str]:
    """The cases that differ, and a last line that should count more than a few."""
    lines = output.splitlines()
    assert re.fullmatch(r"\d+ of [1-9]\d{2,} cases differ", lines[-1]), lines[-1]
    return [line for line in lines[1:-1] if not line.endswith(": ok")]


@pytest.mark.parametrize("name", isa.available())
def test_native_kernels_give_what_scalar_gives(native: Runner, name: str) -> None:
    done = native.run(name)
    assert differing(done.stdout) == []
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"testing {name}")


@needs_cross
def test_dot_product_kernels_are_chosen_and_give_what_scalar_gives(cross: Runner) -> None:
    done = cross.run(cpu="cortex-a76")
    assert differing(done.stdout) == []
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "testing neon_dotprod")


@needs_cross
@pytest.mark.skipif(not native_is_x86, reason="this is the same machine")
def test_scalar_has_one_arithmetic_on_both_machines(cross: Runner, native: Runner) -> None:
    """Digests, case by case, of every kernel: floats too, as nothing is fused or reordered."""
    assert cross.run("scalar", cpu="cortex-a76").stdout == native.run("scalar").stdout


@needs_cross
def test_a_cpu_without_dot_products_runs_scalar_and_refuses_them(cross: Runner) -> None:
    done = cross.run(cpu="cortex-a53")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "testing scalar")
    refused = cross.run("neon_dotprod", cpu="cortex-a53")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "this CPU lacks neon_dotprod\n")


@needs_cross
def test_dot_products_stand_in_their_own_objects_alone(cross: Runner) -> None:
    """Nothing else uses an instruction behind the armv8.0 baseline: sdot, udot, or an atomic of armv8.1."""
    later = re.compile(r"\t(?:sdot|udot|ldadd|ldset|ldclr|swp|cas)[a-z]*\t")
    found = {}
    for path in cross.objects:
        listing = subprocess.run([OBJDUMP, "-d", str(path)], capture_output=True, text=True, check=True)
        found[path.stem.removeprefix("_kernels_")] = bool(later.search(listing.stdout))
    assert {name for name, uses in found.items() if uses} == {"neon_dotprod_linear", "neon_dotprod_attention"}
    assert {"scalar_linear", "select"} <= set(found)
