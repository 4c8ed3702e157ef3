"""The documentation names every command, configuration key, exit code and public function."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from pydantic import BaseModel

import audit
from audit import config as configuration
from audit.cli import app
from audit.errors import ExitCode

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)


def commands() -> list[str]:
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def sections() -> list[tuple[str, type[BaseModel]]]:
    kinds = [value for value in vars(configuration).values() if isinstance(value, type)]
    models = [kind for kind in kinds if issubclass(kind, BaseModel) and kind.__name__.endswith("Section")]
    return [(model.__name__, model) for model in models if model.model_fields]


@pytest.mark.parametrize("command", commands())
def test_every_command_stands_in_the_readme(command: str) -> None:
    assert f"audit {command}" in DOCUMENTS[0].read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "section"), sections())
def test_every_configuration_key_is_documented(name: str, section: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [key for key in section.model_fields if not re.search(rf"`(\w+\.)?{key}`|\b{key}\.\w", text)]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("code", [code for code in ExitCode if code is not ExitCode.BUG])
def test_every_exit_code_is_documented(code: ExitCode) -> None:
    assert re.search(rf"^\| {int(code)} \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in audit.__all__ if not name.startswith("_")])
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"`(audit\.)?{name}\b", TEXT)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_gallery_shows_every_kind_of_input_in_small_files_linked_from_the_methods() -> None:
    drawings = sorted((ROOT / "docs" / "gallery").glob("*.svg"))
    assert {path.stem for path in drawings} == {"text", "image", "audio", "seq2seq", "clip", "image-text"}
    assert sum(path.stat().st_size for path in drawings) < 300_000
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    methods = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert "(gallery.md)" in methods
    for path in drawings:
        assert f"](gallery/{path.name})" in page
        assert f"](gallery/{path.name})" in methods
        drawing = ElementTree.parse(path).getroot()
        assert drawing.find("{http://www.w3.org/2000/svg}title") is not None
        assert sum(1 for _ in drawing.iter("{http://www.w3.org/2000/svg}rect")) > 5
