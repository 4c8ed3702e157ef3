"""`audit init`: look at a model and a probe set, and write a configuration that runs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from audit.errors import ConfigError, ProbeError
from audit.models import checkpoint_info
from audit.models.tasks import BACKBONE, MODALITIES, task_of
from audit.pipeline.files import writing
from audit.probes import read_probes
from audit.probes.fields import CONTENT, FIELDS
from audit.probes.rows import read_rows
from audit.records import CheckpointInfo, Probe, ProbeSet

SYNONYMS = {
    "text": ("sentence", "content", "review", "document", "premise", "question", "sentence1", "prompt"),
    "text_pair": ("hypothesis", "context", "sentence2", "passage"),
    "image": ("img", "file_name", "picture"),
    "audio": ("sound", "clip"),
    "label": ("labels", "target", "class", "category", "sentiment"),
    "id": ("idx", "uid", "guid"),
}
"""Names that other data sets give to our fields, most telling first."""

MEDIA = frozenset({"image", "audio", "img", "file_name", "picture", "sound", "clip"})
MASK_TOKENS = ("[MASK]", "<mask>")
SEGMENT_VALUES = 12
"""A column of text with at most so many values is taken as a segment."""

IMAGE_REGIONS = {
    "centre": "{ box = [0.25, 0.25, 0.75, 0.75] }",
    "corner": "{ box = [0.75, 0.75, 1.0, 1.0] }",
    "quarter": "{ grid = [2, 2] }",
}
TEXT_REGIONS = {
    "opening": "{ quantile = [0.0, 0.25] }",
    "middle": "{ quantile = [0.25, 0.75] }",
    "ending": "{ quantile = [0.75, 1.0] }",
}

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
path = {probes}{columns}

[method]
name = "rollout"
row = {row}

[regions]
{regions}

{rules}
"""


@dataclass(frozen=True)
class _Subject:
    """What `audit init` looks at, and what it inferred."""

    model: str
    info: CheckpointInfo
    probes: ProbeSet
    columns: dict[str, str]

    @property
    def task(self) -> str:
        image = self.modality == "image+text"
        return task_of(self.info.architecture, self.info.model_type, vision_config=image)

    @property
    def modality(self) -> str:
        return self.probes.probes[0].modality


def write_initial_config(
    model: str,
    probes: str | Path,
    out: str | Path,
    *,
    after: str | None = None,
    replicates: str | None = None,
    force: bool = False,
) -> dict[str, str]:
    """Write an audit.toml for `model` on `probes` and return what was inferred.

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

    Returns
    -------
    dict
        ``model``, ``task``, ``probes``, ``columns``, ``row``, ``config`` and ``next``, each in words.

    Raises
    ------
    ConfigError
        When `out` exists and `force` is not set.
    CheckpointError, ProbeError
        When the model or the probe set cannot be read, or the model does not read what the probes hold.
    """
    out = Path(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; pass --force to overwrite it, or --out another file")
    info = checkpoint_info(model)
    columns = infer_columns(probes)
    subject = _Subject(model, info, read_probes(probes, columns=columns or None), columns)
    _check_modality(subject, probes)
    text = _fill(subject, out, Path(probes), after, replicates)
    with writing(out):
        out.write_text(text, encoding="utf-8")
    row, reading = _row(subject)
    return {
        "model": f"{info.architecture or 'backbone'} ({info.model_type}), {len(info.labels)} labels",
        "task": subject.task,
        "probes": f"{len(subject.probes)} of {subject.modality}",
        "columns": ", ".join(f"{field} = {column}" for field, column in columns.items()) or "as named",
        "row": f"{row}: {reading}",
        "config": str(out),
        "next": f"audit run {out}",
    }


def _check_modality(subject: _Subject, probes: str | Path) -> None:
    reads = MODALITIES.get(subject.task, subject.modality)
    if subject.modality in MODALITIES.values() and subject.modality != reads:
        raise ProbeError(
            f"{probes} holds {subject.modality} but {subject.info.architecture} reads {reads}; name a probe "
            f"file of {reads}, or another model"
        )


def infer_columns(path: str | Path) -> dict[str, str]:
    r"""Return our field → the file's column, for columns that go by another name.

    Text columns that name nothing of ours and have few values become segments; others are left out.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "probes.csv"
    >>> _ = path.write_text("idx,sentence,label\n1,It was great.,positive\n")
    >>> infer_columns(path)
    {'text': 'sentence', 'id': 'idx'}
    """
    rows = [row for _, row in read_rows(Path(path))]
    present = dict.fromkeys(key for row in rows for key in row)
    found: dict[str, str] = {}
    for field, names in SYNONYMS.items():
        match = next((name for name in names if name in present and name not in found.values()), None)
        if field not in present and match is not None and (field != "text" or not present.keys() & MEDIA):
            found[field] = match
    unknown = [key for key in present if key not in {*FIELDS, *found.values()} and "." not in key]
    found |= {f"segments.{key}": key for key in unknown if _is_segment([row.get(key) for row in rows])}
    if unknown and not found:  # a mapping, even one that renames nothing, lets other columns be
        field = next(name for name in (*CONTENT, *present) if name in present)
        found[field] = field
    return found


def _is_segment(values: list[object]) -> bool:
    distinct = set(map(str, values))
    return all(isinstance(value, str) for value in values) and 2 <= len(distinct) <= SEGMENT_VALUES


def _fill(subject: _Subject, out: Path, probes_path: Path, after: str | None, replicates: str | None) -> str:
    info, base, regions = subject.info, out.parent, _regions(subject)
    row, reading = _row(subject)
    return TEMPLATE.format(
        what=f"{info.architecture or info.model_type} on {len(subject.probes)} probes of {subject.modality}",
        name=out,
        before=_path(subject.model, base),
        after=_path(after or subject.model, base),
        after_note="" if after else "          # put the checkpoint to judge here",
        replicates=_replicates(replicates, base),
        probes=_path(str(probes_path), base),
        columns=f"\ncolumns = {_inline(subject.columns)}" if subject.columns else "",
        row=f"{json.dumps(row):<23} # {reading}",
        regions="\n".join(f"{name} = {value}" for name, value in regions.items()),
        rules=_rules(subject.probes, regions, excess=replicates is not None),
    )


def _path(ref: str, base: Path) -> str:
    """Return a local path relative to the configuration's folder, a hub id as it is; quoted for TOML."""
    local = Path(ref)
    text = os.path.relpath(local.resolve(), base.resolve()) if local.exists() else ref
    return json.dumps(text if not local.exists() or text.startswith(".") else f"./{text}", ensure_ascii=False)


def _inline(mapping: dict[str, str]) -> str:
    items = ", ".join(f"{_quoted(key)} = {_quoted(value)}" for key, value in mapping.items())
    return f"{{ {items} }}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _replicates(pattern: str | None, base: Path) -> str:
    if pattern is None:
        return (
            "\n# Harmless re-trainings of the same base (5 or more, other seeds) are the noise floor:\n"
            '# [[replicates]]\n# path = "models/seed-*"\n# kind = "seed"\n'
        )
    relative = os.path.relpath(Path(pattern).absolute(), base.resolve())
    return f'\n[[replicates]]\npath = {json.dumps(relative)}\nkind = "seed"\n'


def _row(subject: _Subject) -> tuple[str, str]:
    """Return the output row, and which row that is in words."""
    if subject.task == "masked-lm" and not all(_has_mask(probe) for probe in subject.probes):
        return "mean", "the mean over all positions, since not every probe has a mask token"
    return "auto", {
        "masked-lm": "the mask position",
        "causal-lm": "the last non-pad token",
        "image-text-to-text": "the last position, which predicts the first token of the answer",
        BACKBONE: "CLS, or the pooling that the checkpoint declares",
    }.get(subject.task, "the positions that the task head reads")


def _has_mask(probe: Probe) -> bool:
    text = (probe.text or "") + (probe.text_pair or "")
    return any(token in text for token in MASK_TOKENS)


def _regions(subject: _Subject) -> dict[str, str]:
    usual = IMAGE_REGIONS if subject.modality == "image" else TEXT_REGIONS
    annotated = {name for probe in subject.probes for name in probe.regions}
    return {name: value for name, value in usual.items() if name not in annotated}


def _rules(probes: ProbeSet, regions: dict[str, str], *, excess: bool) -> str:
    annotated = sorted({name for probe in probes for name in probe.regions})
    named = annotated or ["corner" if "corner" in regions else "*"]
    limit = 'kind = "limit"\nmeasure = "shift"\nfail = 0.02\nwarn = 0.01\n'
    kinds = [limit, 'kind = "excess"\nwithin = 0.02\n'] if excess else [limit]
    return "\n".join(f"[[gate.rules]]\nregion = {_quoted(name)}\n{kind}" for kind in kinds for name in named)
