"""Docstrings against the code: a reference must name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("audit", "flows", "dashboards") for path in (ROOT / folder).rglob("*.py"))
REFERENCE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return what a module or class defines, members of classes as ``Class.member``."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                prefix + one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)
            }
    return found


def imports_in(tree: ast.Module) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {one.asname or one.name for node in imports for one in node.names}


TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
NAMES = {module: names_in(tree.body) for module, tree in TREES.items()}
PACKAGES = {module_of(path) for path in FILES if path.name == "__init__.py"}
LAZY = {"audit"}
"""Packages whose names are looked up when they are asked for; tests/unit/test_public_api.py checks them."""


def is_there(reference: str, module: str) -> bool:
    if not reference.startswith(("audit.", "flows.", "dashboards.")):
        members = {name.rpartition(".")[2] for name in NAMES[module]}
        known = members | NAMES[module] | imports_in(TREES[module])
        return reference in known or reference.partition(".")[0] in known
    if reference in TREES:
        return True
    home = max((name for name in TREES if reference.startswith(name + ".")), key=len)
    name = reference[len(home) + 1 :]
    shown = imports_in(TREES[home]) if home in PACKAGES else set()
    return home in LAZY or name in NAMES[home] | shown


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_references_name_what_is_there(path):
    references = REFERENCE.findall(path.read_text(encoding="utf-8"))
    assert [one for one in references if not is_there(one, module_of(path))] == []
