"""Names that tell checkpoints apart: the last part of a path, with its folder where that is not enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from audit.records import RunRef, Verdict
from audit.report import rows
from audit.report.wording import clip

WIDEST = 60
Pair = tuple[str | None, str | None]
"""Before and after, as they were given: a path or a hub id."""


def short_name(ref: RunRef | str | None) -> str:
    """Return the last part of a checkpoint's path, or a hub id as it is.

    Examples
    --------
    >>> short_name("/models/reviews/base"), short_name("org/model")
    ('base', 'org/model')
    """
    name = ref.checkpoint if isinstance(ref, RunRef) else ref
    if not name:
        return "unknown"
    path = Path(name)
    return clip(path.name if path.is_absolute() or len(path.parts) > 2 else str(name), WIDEST)


def pair_name(before: str | None, after: str | None) -> str:
    """Return both checkpoints, with their folders where the last parts alone are equal.

    Examples
    --------
    >>> pair_name("/models/base", "/models/tuned"), pair_name("/a/model", "/b/model")
    ('base → tuned', 'a/model → b/model')
    """
    names = [short_name(before), short_name(after)]
    if names[0] == names[1] and before and after and before != after:
        names = [_with_folder(one) for one in (before, after)]
    return " → ".join(names)


def _with_folder(name: str) -> str:
    return clip("/".join(Path(name).parts[-2:]), WIDEST)


def _long_pair_name(before: str | None, after: str | None) -> str:
    folders = [Path(one or "").parent.name for one in (before, after)]
    if folders[0] == folders[1] and folders[0]:
        return f"{clip(folders[0], WIDEST)}: {pair_name(before, after)}"
    return " → ".join(_with_folder(one or "unknown") for one in (before, after))


def pair_of(manifest: Mapping[str, Any]) -> Pair:
    """Return the two checkpoints of a comparison's manifest."""
    before, after = ((manifest[side] or {}).get("checkpoint") for side in ("before", "after"))
    return before, after


def outcome_of(manifest: Mapping[str, Any]) -> str:
    """Return the outcome of a comparison as it is read today, in words: ``PASS (approved)``.

    Examples
    --------
    >>> outcome_of({"outcome": "PASS", "accepted": {"bob": ("limit shift opening",)}})
    'PASS (approved)'
    """
    outcome = str(manifest["outcome"] or rows.COMPARED)
    if manifest.get("changed"):
        return f"{outcome} (changed since it was logged)"
    return f"{outcome} (approved)" if manifest.get("accepted") and outcome != "FAIL" else outcome


def accepted(found: Verdict) -> dict[str, tuple[str, ...]]:
    """Return who accepted (with date and reason) → the rules and regions that this person accepted."""
    by: dict[str, list[str]] = {}
    for one in found.rules:
        if one.approved_by:
            by.setdefault(one.approved_by, []).append(f"{one.rule.label} on {one.region}")
    return {who: tuple(dict.fromkeys(what)) for who, what in by.items()}


def pair_names(manifests: Iterable[Mapping[str, Any]]) -> dict[Pair, str]:
    """Return a name for each pair of checkpoints, no two alike as far as their folders differ.

    Parameters
    ----------
    manifests : iterable of mapping
        Of comparisons.
    """
    pairs = dict.fromkeys(map(pair_of, manifests))
    shared = Counter(pair_name(*pair) for pair in pairs)
    return {
        pair: pair_name(*pair) if shared[pair_name(*pair)] == 1 else _long_pair_name(*pair) for pair in pairs
    }


def checkpoint_names(refs: Sequence[str]) -> dict[str, str]:
    """Return a name for each checkpoint, with its folder where several have one last part."""
    distinct = dict.fromkeys(refs)
    shared = Counter(map(short_name, distinct))
    return {ref: short_name(ref) if shared[short_name(ref)] == 1 else _with_folder(ref) for ref in distinct}


def crossed(manifest: Mapping[str, Any]) -> bool:
    """Return whether a comparison crosses two checkpoints with two probe sets (2×2)."""
    return manifest["kind"] == "paired" and bool(manifest.get("settings", {}).get("domain"))
