"""The house has floors: a module imports only from lower ranks or its own folder.

Every import counts: at the top, inside functions, under TYPE_CHECKING, relative, and by `import_module("...")`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rorqual"
MAX_LINES = 500

RANKS = {
    "errors": 0,
    "log": 0,
    "config": 1,
    "formats": 1,
    "layout": 2,
    "inventory": 2,
    "policies": 3,
    "ops": 3,
    "planner": 4,
    "pool": 4,
    "cache": 4,
    "checkpoint": 4,
    "store": 5,
    "model": 5,
    "engine": 6,
    "disagg": 7,
    "training": 7,
    "server": 8,
    "analysis": 8,
    "bench": 8,
    "cli": 9,
}
# `rorqual/__init__.py` hands out names from any floor, lazily; only the top floor may import it in turn.
FACADE = "__init__"
TOP = max(RANKS.values())
MAY_COMPUTE_IMPORTS = {FACADE, "cli"}

TORCH_FREE = ("errors", "log", "config", "formats.spec", "layout", "inventory", "policies", "planner", "pool", "store")


def sources(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def module_of(path: Path, root: Path) -> list[str]:
    """The dotted module of a file, `__init__` kept as a last part so that its package is what precedes it."""
    return list(path.relative_to(root).with_suffix("").parts)


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, list[str] | None]]:
    """(line, dotted module) of every import of our own package; None where the module's name is computed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name]
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
            yield node.lineno, first.value.split(".") if literal else None


def _called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def violations(root: Path) -> list[str]:
    """Every upward, sideways or unranked import under `root/rorqual`, as `file:line: what`."""
    found = []
    for path in sources(root):
        module = module_of(path, root)
        importer = module[1]
        where = path.relative_to(root)
        if importer not in RANKS and importer != FACADE:
            found.append(f"{where}:1: '{importer}' has no rank")
            continue
        for line, target in imported_modules(ast.parse(path.read_text(encoding="utf-8")), module[:-1]):
            reason = _refusal(importer, target)
            if reason:
                found.append(f"{where}:{line}: {reason}")
    return found


def _refusal(importer: str, target: list[str] | None) -> str | None:
    if target is None:
        return None if importer in MAY_COMPUTE_IMPORTS else f"'{importer}' computes the name of what it imports"
    if target[0] != PACKAGE:
        return None
    # `from rorqual import load` names an attribute of the facade, not a module.
    imported = target[1] if len(target) > 1 and target[1] in RANKS else FACADE
    if importer in (FACADE, imported):
        return None
    if imported == FACADE:
        attribute = ".".join(target)
        return None if RANKS[importer] == TOP else f"'{importer}' imports {attribute}, which only the top floor may"
    if RANKS[imported] < RANKS[importer]:
        return None
    direction = "sideways" if RANKS[imported] == RANKS[importer] else "upward"
    return f"'{importer}' (rank {RANKS[importer]}) imports {direction} from '{imported}' (rank {RANKS[imported]})"


def test_no_upward_or_sideways_import() -> None:
    assert violations(ROOT) == []


def test_files_stay_readable() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in sources(ROOT)}
    assert len(lengths) > 10, "the scan found no package"
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_light_modules_load_no_torch() -> None:
    modules = []
    for path in sources(ROOT):
        name = ".".join(module_of(path, ROOT)).removesuffix(".__init__")
        if any(f"{name}.".startswith(f"{PACKAGE}.{light}.") for light in TORCH_FREE):
            modules.append(name)
    assert {"rorqual.errors", "rorqual.config", "rorqual.formats.spec", "rorqual.layout"} <= set(modules)
    modules += ["rorqual", "rorqual.cli", "rorqual.cli.output", "rorqual.cli.inspect", "rorqual.cli.init"]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [heavy for heavy in ('torch', 'numba') if heavy in sys.modules]\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


PLANTED = {
    "upward": ("ops/topk.py", "from rorqual.model import attention\n", "upward"),
    "sideways": ("cache/pages.py", "import rorqual.pool.free_list\n", "sideways"),
    "sideways at rank 0": ("errors.py", "from rorqual import log\n", "sideways"),
    "inside a function": ("ops/topk.py", "def f():\n    from rorqual.engine.runner import run\n", "upward"),
    "under TYPE_CHECKING": (
        "config/roles.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rorqual.layout import KVLayout\n",
        "upward",
    ),
    "relative": ("config/roles.py", "from ..ops import dispatch\n", "upward"),
    "relative to the package": ("ops/reference/topk.py", "from ... import model\n", "upward"),
    "by import_module": ("ops/topk.py", "import importlib\nimportlib.import_module('rorqual.cli')\n", "upward"),
    "a computed name": ("ops/topk.py", "from importlib import import_module\nimport_module(f'{1}')\n", "computes"),
    "the facade": ("engine/llm.py", "from rorqual import load\n", "top floor"),
    "an unranked folder": ("helpers/misc.py", "", "no rank"),
}
ALLOWED = {
    "lower": ("model/attention.py", "from rorqual.ops import topk\nfrom rorqual.cache.pages import Pages\n"),
    "own folder": ("ops/fast/topk.py", "from rorqual.ops.paged import PagedRegion\nfrom ..paged import PagedRegion\n"),
    "foreign by the name of a folder": (
        "ops/triton/scores.py",
        "import triton\nimport triton.language as tl\nfrom rorqual.ops.triton.decode import locate\n",
    ),
    "foreign": ("errors.py", "import os, torch\nfrom importlib import import_module\nimport_module('json')\n"),
    "the facade from the top": ("cli/generate.py", "import rorqual\nfrom rorqual import __version__, load\n"),
    "the facade itself": ("__init__.py", "from rorqual.engine.load import load\n"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_checker_finds_a_planted_violation(case: str, tmp_path: Path) -> None:
    file, text, expected = PLANTED[case]
    _plant(tmp_path, file, text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].startswith(f"{PACKAGE}/{file}:")


@pytest.mark.parametrize("case", ALLOWED)
def test_checker_passes_a_legal_import(case: str, tmp_path: Path) -> None:
    _plant(tmp_path, *ALLOWED[case])
    assert violations(tmp_path) == []


def _plant(root: Path, file: str, text: str) -> None:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
