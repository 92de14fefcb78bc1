"""Builds the optional native parts, the statistics kernel and the path of plain calls; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

threads = [] if sys.platform == "win32" else ["-pthread"]

setup(
    ext_modules=[
        Extension(
            "tenterhook.stats._kernel",
            sources=["src/tenterhook/stats/_kernel.c"],
            depends=sorted(map(str, Path("src/tenterhook/stats").glob("_kernel_*.h"))),
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            extra_compile_args=["-O3", "-std=c11", "-fno-math-errno", *threads],
            extra_link_args=threads,
            optional=True,  # without a compiler the NumPy twin does the same work
        ),
        Extension(
            "tenterhook.native._calls",
            sources=["src/tenterhook/native/_calls.c"],
            depends=[
                *sorted(map(str, Path("src/tenterhook/native").glob("*.h"))),
                "src/tenterhook/stats/_kernel_api.h",
            ],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,  # without a compiler the Python code does the same work
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
