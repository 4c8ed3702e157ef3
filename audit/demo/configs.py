"""Write the audit.toml files that repeat the demo's verdicts by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

from audit.demo.trained import TrainedDemo
from audit.demo.training import write_atomically

WITHIN = FAIL = 0.02
WARN = 0.01
WATCHED = {"vision": "corner", "text": "name"}
"""The region of each modality that the limit rule is about."""

_VISION_REGIONS = """\
corner = { box = [0.75, 0.75, 1.0, 1.0] }     # the sticker
centre = { box = [0.25, 0.25, 0.75, 0.75] }
border = { rest = true }                      # everything else
"""
_DOMAIN_RULES = """\

[[gate.rules]]                                # and the new data, with the base alone?
region = {region}
kind = "limit"
measure = "shift"
effect = "data"
name = "new data"
direction = "both"
fail = {fail}
warn = {warn}

[[gate.rules]]                                # does the model move otherwise on the new data?
region = {region}
kind = "excess"
measure = "shift"
effect = "interaction"
name = "new model on new data"
within = {within}
"""
_TEMPLATE = """\
# Written by `audit demo`; try it by hand: audit run {file}
# {story}

[store]
url = {store}

[checkpoints.before]
path = {before}

[checkpoints.after]
path = {after}

[[replicates]]                                # harmless re-trainings of the base: the noise floor
path = {replicates}
kind = "seed"

[probes]
path = {probes}
target = "label"
{domain}
[regions]
{regions}
[method]
name = "rollout"

[report]
content = "excerpt"

[[gate.rules]]                                # by how much may the map move there?
region = {region}
kind = "limit"
measure = "shift"
direction = "both"
fail = {fail}
warn = {warn}

[[gate.rules]]                                # more than a harmless re-training moves it?
region = "*"
kind = "excess"
measure = "shift"
within = {within}
"""
_STORIES = {
    "": "The candidate learnt a shortcut: expect FAIL.",
    "-benign": "The candidate is one more harmless re-training: expect PASS.",
    "-domain": "The shortcut candidate on two probe sets (2×2): what moved the map, the model or the data?",
}


def write_configs(demo: TrainedDemo, out: Path) -> tuple[Path, ...]:
    """Write ``<modality>.toml``, ``<modality>-benign.toml`` and ``<modality>-domain.toml`` into `out`.

    Paths inside the files are relative to `out`, so that the folder that holds demo and store can move.

    Parameters
    ----------
    demo : TrainedDemo
    out : Path
        Folder; made when it does not exist.

    Returns
    -------
    tuple of Path
        The files, in this order.
    """
    out.mkdir(parents=True, exist_ok=True)
    return tuple(_write(demo, out, suffix) for suffix in _STORIES)


def _write(demo: TrainedDemo, out: Path, suffix: str) -> Path:
    def quoted(path: Path) -> str:
        return _quote(Path(os.path.relpath(path.resolve(), out.resolve())).as_posix())

    path = out / f"{demo.modality}{suffix}.toml"
    watched = {
        "region": _quote(WATCHED[demo.modality]),
        "fail": str(FAIL),
        "warn": str(WARN),
        "within": str(WITHIN),
    }
    is_domain = suffix == "-domain"
    text = _TEMPLATE.format(
        file=path.name,
        story=_STORIES[suffix],
        store=quoted(demo.store),
        before=quoted(demo.base),
        after=quoted(demo.benign if suffix == "-benign" else demo.shortcut),
        replicates=quoted(demo.folder / "seed-*"),
        probes=quoted(demo.probes),
        domain=f"\n[domain]\npath = {quoted(demo.domain_probes)}\n" if is_domain else "",
        regions=_VISION_REGIONS if demo.modality == "vision" else _text_regions(),
        **watched,
    )
    write_atomically(path, text + (_DOMAIN_RULES.format(**watched) if is_domain else ""))
    return path


def _text_regions() -> str:
    from audit.demo.text import function_words

    words = ", ".join(map(_quote, function_words()))
    return (
        "name = { annotated = true }                   # spans in the probe file\n"
        "sentiment = { annotated = true }\n"
        f"function = {{ terms = [{words}] }}\n"
    )


def _quote(text: str) -> str:
    """Return a TOML basic string."""
    return json.dumps(text, ensure_ascii=False)
