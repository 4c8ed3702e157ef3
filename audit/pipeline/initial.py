"""`audit init`: look at a model and a probe set, and write a configuration that runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from audit._probe_rows import read_rows
from audit.errors import ConfigError
from audit.models import checkpoint_info
from audit.probes import read_probes
from audit.records import CheckpointInfo, ProbeSet

SYNONYMS = {
    "text": ("sentence", "content", "review", "document", "premise", "question", "sentence1", "prompt"),
    "text_pair": ("hypothesis", "context", "sentence2", "passage"),
    "image": ("img", "file_name", "picture"),
    "audio": ("sound", "clip"),
    "label": ("labels", "target", "class", "category", "sentiment"),
    "id": ("idx", "uid", "guid"),
}
"""Names that other data sets give to our fields, most telling first."""

TEMPLATE = """\
# Written by `audit init`: {what}.
# Paths are relative to this file. `audit run {name}` captures, compares and judges.

[store]
url = "data/store"

[checkpoints.before]
path = {before}

[checkpoints.after]
path = {after}{after_note}
{replicates}
[probes]
path = {probes}{columns}{truncation}

[method]
name = "rollout"
row = "auto"                # {row}

[regions]
{regions}

{rules}
"""


def write_initial_config(
    model: str,
    probes: str | Path,
    out: str | Path,
    *,
    after: str | None = None,
    replicates: str | None = None,
    force: bool = False,
) -> Iterator[str]:
    """Write an audit.toml for `model` on `probes` and yield what was inferred, a line each.

    Parameters
    ----------
    model : str
        Directory or hub id of the checkpoint before.
    probes : path
    out : path
        The file to write.
    after : str, optional
        The checkpoint to judge; `model` itself where not given, so that the file runs at once.
    replicates : str, optional
        Path or glob of harmless re-trainings.
    force : bool
        Overwrite `out`.

    Raises
    ------
    ConfigError
        When `out` exists and `force` is not set.
    CheckpointError, ProbeError
        When the model or the probe set cannot be read.
    """
    out = Path(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; pass --force to overwrite it, or --out another file")
    info = checkpoint_info(model)
    columns = infer_columns(probes)
    probe_set = read_probes(probes, columns=columns or None)
    text = _fill(info, probe_set, out, model, Path(probes), columns, after, replicates)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    modality = probe_set.probes[0].modality
    yield f"model     {info.architecture or 'backbone'} ({info.model_type}), {len(info.labels)} labels"
    yield f"probes    {len(probe_set)} of {modality}" + (f", columns {columns}" if columns else "")
    yield f"row       {_row(info)}"
    yield f"wrote     {out}; run it with `audit run {out}`"


def infer_columns(path: str | Path) -> dict[str, str]:
    r"""Return our field → the file's column, for columns that go by another usual name.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "probes.csv"
    >>> _ = path.write_text("idx,sentence,label\n1,It was great.,positive\n")
    >>> infer_columns(path)
    {'text': 'sentence', 'id': 'idx'}
    """
    rows = read_rows(Path(path))
    present = set(rows[0][1]) if rows else set()
    found: dict[str, str] = {}
    for field, names in SYNONYMS.items():
        match = next((name for name in names if name in present), None)
        if field not in present and match is not None:
            found[field] = match
    return found


def _fill(  # noqa: PLR0917
    info: CheckpointInfo,
    probes: ProbeSet,
    out: Path,
    model: str,
    probes_path: Path,
    columns: dict[str, str],
    after: str | None,
    replicates: str | None,
) -> str:
    base = out.parent
    first = probes.probes[0]
    regions = _regions(probes)
    return TEMPLATE.format(
        what=f"{info.architecture or info.model_type} on {len(probes)} probes of {first.modality}",
        name=out,
        before=_path(model, base),
        after=_path(after or model, base),
        after_note="" if after else "          # put the checkpoint to judge here",
        replicates=_replicates(replicates, base),
        probes=_path(str(probes_path), base),
        columns=f"\ncolumns = {_inline(columns)}" if columns else "",
        truncation="",
        row=_row(info),
        regions="\n".join(f"{name} = {value}" for name, value in regions.items()),
        rules=_rules(probes, regions, excess=replicates is not None),
    )


def _path(ref: str, base: Path) -> str:
    """Return a local path relative to the configuration's folder, a hub id as it is; quoted for TOML."""
    local = Path(ref)
    text = os.path.relpath(local.resolve(), base.resolve()) if local.exists() else ref
    return json.dumps(text if not local.exists() or text.startswith(".") else f"./{text}", ensure_ascii=False)


def _inline(mapping: dict[str, str]) -> str:
    items = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in mapping.items())
    return f"{{ {items} }}"


def _replicates(pattern: str | None, base: Path) -> str:
    if pattern is None:
        return (
            "\n# Harmless re-trainings of the same base (5 or more, other seeds) are the noise floor:\n"
            '# [[replicates]]\n# path = "models/seed-*"\n# kind = "seed"\n'
        )
    relative = os.path.relpath(Path(pattern).absolute(), base.resolve())
    return f'\n[[replicates]]\npath = {json.dumps(relative)}\nkind = "seed"\n'


def _row(info: CheckpointInfo) -> str:
    architecture = info.architecture or ""
    if architecture.endswith("ForMaskedLM"):
        return "the mask position"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "the last non-pad token"
    return "the position that the task head reads"


def _regions(probes: ProbeSet) -> dict[str, str]:
    if probes.probes[0].modality == "image":
        return {
            "centre": "{ box = [0.25, 0.25, 0.75, 0.75] }",
            "corner": "{ box = [0.75, 0.75, 1.0, 1.0] }",
            "quarter": "{ grid = [2, 2] }",
        }
    return {
        "opening": "{ quantile = [0.0, 0.25] }",
        "middle": "{ quantile = [0.25, 0.75] }",
        "ending": "{ quantile = [0.75, 1.0] }",
    }


def _rules(probes: ProbeSet, regions: dict[str, str], *, excess: bool) -> str:
    annotated = sorted({name for probe in probes for name in probe.regions})
    named = annotated or ["corner" if "corner" in regions else "*"]
    blocks = [
        f'[[gate.rules]]\nregion = "{name}"\nkind = "limit"\nmeasure = "shift"\nfail = 0.02\nwarn = 0.01\n'
        for name in named
    ]
    if excess:
        blocks += [f'[[gate.rules]]\nregion = "{name}"\nkind = "excess"\nwithin = 0.02\n' for name in named]
    return "\n".join(blocks)
