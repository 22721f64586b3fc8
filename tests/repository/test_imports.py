"""Imports go one way, torch stays in train, and a file stays one noun."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "twoends"
MODULES = sorted(PACKAGE.rglob("*.py"))

_LEAVES = {"shapes", "units", "errors"}
_KERNELS = {"kernels", *_LEAVES}
_ENGINE = {"checkpoint", "model", *_KERNELS}
_GENERATE = {"engine", *_ENGINE}
MAY_IMPORT = {
    "errors": {"errors"},
    "shapes": set(),
    "units": {"errors"},
    "kernels": _KERNELS,
    "checkpoint": {"checkpoint", *_KERNELS},
    "model": _ENGINE,
    "engine": _GENERATE,
    "generate": {"generate", *_GENERATE},
    "api": {"generate", *_GENERATE},
    "bench": {"bench", "generate", *_GENERATE},
    "sizing": {"sizing", *_GENERATE},
    "train": {"train", *_ENGINE},
    "cli": {"cli", "api", "bench", "generate", "sizing", "train", *_GENERATE},
}


def area(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_areas(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "twoends":
                names = [f"twoends.{alias.name}" for alias in node.names]
            else:
                names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("twoends.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_lies_below_it(path):
    if area(path) in ("__init__", "__main__"):
        return
    wrong = imported_areas(path) - MAY_IMPORT[area(path)] - {"__version__"}
    assert not wrong, f"{path.name} imports {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_stays_below_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_so_does_a_file_of_tests():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_function_stays_below_60_lines(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_source_is_ascii(path):
    assert path.read_bytes().isascii()


@pytest.mark.parametrize(
    "module", ["twoends", "twoends.engine.open", "twoends.generate.generator", "twoends.cli.main"]
)
def test_inference_never_imports_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
