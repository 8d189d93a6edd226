# SPDX-License-Identifier: Apache-2.0
"""The extension modules. Everything else about the package stands in pyproject.toml.

One baseline flag set builds every C file: those for newer instruction sets open them by a target pragma.
CECILIA_DEBUG=1 builds with bounds checks and the address and undefined-behaviour sanitizers.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNELS = "cecilia/_kernels"
DEBUG = os.environ.get("CECILIA_DEBUG") == "1"

FLAGS = [
    "-std=gnu11",
    "-fvisibility=hidden",
    "-fopenmp",
    "-ffp-contract=off",  # the scalar kernels are the reference: what is written is what is computed
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Werror=implicit-function-declaration",
]
FLAGS += ["-O1", "-g", "-fsanitize=address,undefined"] if DEBUG else ["-O3", "-g0"]
LINK = ["-fopenmp"] + (["-fsanitize=address,undefined"] if DEBUG else ["-s"])


def extension(name: str, *sources: str) -> Extension:
    path = name.replace(".", "/") + ".pyx"
    headers = glob(f"{KERNELS}/c/*.h") + glob(f"{KERNELS}/*.pxd")
    return Extension(
        name,
        [path, *sources],
        depends=headers,
        include_dirs=[KERNELS],
        extra_compile_args=FLAGS,
        extra_link_args=LINK,
    )


EXTENSIONS = [
    extension("cecilia._kernels.isa", *sorted(glob(f"{KERNELS}/c/*.c"))),
    *(
        extension(f"cecilia._kernels.{name}")
        for name in (
            "threads",
            "buffer",
            "linear",
            "pointwise",
            "paged",
            "attention",
            "sampling",
            "delta",
            "experts",
            "mla",
        )
    ),
    extension("cecilia.state.pages"),
]

setup(
    ext_modules=cythonize(
        EXTENSIONS,
        build_dir="build/cython",
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": DEBUG,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
        },
    )
)
