"""The source distribution holds what is needed to build it, and all tests with what they read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ("src", "tests", "examples", "docs", "news", "benchmarks")
LOOSE = (
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
)
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
MADE = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".*")


def test_the_source_distribution_is_whole_and_its_tests_run(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in KEPT:
        shutil.copytree(ROOT / name, tree / name, ignore=MADE)
    for name in LOOSE:
        shutil.copy(ROOT / name, tree / name)
    wanted = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / built.stdout.splitlines()[-1]) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert wanted - found == set()
    asked = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/cli/test_numbers.py",
        "tests/recording/test_manifest.py",
    ]
    ran = subprocess.run(asked, cwd=unpacked, capture_output=True, text=True, check=False, env=None)
    assert ran.returncode == 0, ran.stdout + ran.stderr
