"""What a configuration and its probes alone can tell to be wrong, before anything is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from audit.errors import ConfigError
from audit.records import CheckpointInfo, Probe, ProbeSet, Region, Rule, RunRef
from audit.regions.parse import nearest

CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""Endings of the model classes whose labels must be classes of the checkpoint."""
_TAKES = {"ForImageClassification": "image", "ForAudioClassification": "audio"}

_SHOWN = 3


def classes_of(checkpoint: CheckpointInfo) -> tuple[str, ...]:
    """Return the classes of a classifier, nothing for a regression and every other task.

    >>> classes_of(CheckpointInfo("a", "", "", "", architecture="ViTModel", labels=("no", "yes")))
    ()
    """
    named = (checkpoint.architecture or "").endswith(CLASSIFIERS)
    return checkpoint.labels if named and len(checkpoint.labels) > 1 else ()


def is_class(label: str, classes: Sequence[str]) -> bool:
    """Return whether a label, or every one of several that are joined by commas, is one of the classes.

    >>> is_class("good", ["good", "bad"]), is_class("good, bad", ["good", "bad"]), is_class("fine", ["good"])
    (True, True, False)
    """
    return label in classes or all(part in classes for part in label.split(", ") if part)


def label_note(probes: ProbeSet, checkpoint: CheckpointInfo, name: str) -> str | None:
    """Return one line on labels that are no class of a classifier, None where all are or there are none.

    None, too, where no probe has what the classifier takes: that is refused, and labels are beside the point.

    Parameters
    ----------
    probes : ProbeSet
    checkpoint : CheckpointInfo
    name : str
        Where the probes were read from.
    """
    classes = classes_of(checkpoint) if _fit(probes, checkpoint) else ()
    labelled = [probe for probe in probes if probe.label is not None]
    unknown = [text for probe in labelled for text in _unknown(probe, classes)] if classes else []
    if not unknown:
        return None
    shown = list(dict.fromkeys(unknown))
    more = ", …" if len(shown) > _SHOWN else ""
    known = ", ".join(classes[:_SHOWN]) + (", …" if len(classes) > _SHOWN else "")
    return (
        f"{len(unknown)} of {len(labelled)} labels in {Path(name).name} are no class of {checkpoint.ref} "
        f"({', '.join(map(repr, shown[:_SHOWN]))}{more}; its classes are {known}); such probes count in no "
        "accuracy; mend the labels, or the checkpoint's id2label"
    )


def _fit(probes: ProbeSet, checkpoint: CheckpointInfo) -> bool:
    """Return whether any probe has the image or sound that the classifier takes; other inputs always fit."""
    kinds = [kind for ending, kind in _TAKES.items() if (checkpoint.architecture or "").endswith(ending)]
    return not kinds or any(getattr(probe, kinds[0]) is not None for probe in probes)


def _unknown(probe: Probe, classes: Sequence[str]) -> Iterable[str]:
    """Return a probe's label as text where it is no class: at most one for each probe."""
    label = probe.label
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(classes):
        return ()
    parts = label if isinstance(label, list | tuple) else [label]
    return [str(part) for part in parts if not is_class(str(part), classes)][:1]


def check_rules(rules: Sequence[Rule], regions: Sequence[Region]) -> None:
    """Refuse, before anything is captured, a rule on a region that neither file nor probes have.

    Raises
    ------
    ConfigError
        Naming the nearest region.

    Examples
    --------
    >>> check_rules([Rule("edges", "limit", fail=0.02)], [Region("edge", "box")])
    Traceback (most recent call last):
    audit.errors.ConfigError: rule 'limit shift edges': region 'edges' does not exist; did you mean 'edge'?
    """
    known = [*(region.name for region in regions), "*", "special", "first", "rest"]
    for rule in rules:
        if rule.region not in known:
            raise ConfigError(
                f"rule '{rule.label}': region '{rule.region}' does not exist{nearest(rule.region, known)}"
            )


def check_replicates(checkpoints: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a replicate that is before, after or another replicate: none of them adds to the noise.

    Parameters
    ----------
    checkpoints : sequence of (role, name, digest of the weights)
        Entries of one role are one checkpoint, on several probe sets.

    Raises
    ------
    ConfigError

    Examples
    --------
    >>> check_replicates([("replicate-1", "seed-1", "ab"), ("replicate-2", "copy", "ab")])
    Traceback (most recent call last):
    audit.errors.ConfigError: the replicates seed-1 and copy have equal weights, so that they are no two \
re-trainings; keep one of them in [[replicates]], or train the other again with another seed
    """
    known: dict[str, tuple[str, str]] = {}
    for role, name, weights in sorted(checkpoints, key=lambda one: one[0].startswith("replicate")):
        twin, its_name = known.setdefault(weights, (role, name)) if weights else (role, name)
        if twin == role or not role.startswith("replicate"):
            continue
        if twin.startswith("replicate"):
            raise ConfigError(
                f"the replicates {its_name} and {name} have equal weights, so that they are no two "
                "re-trainings; keep one of them in [[replicates]], or train the other again with another seed"
            )
        raise ConfigError(
            f"the replicate {name} has the weights of [checkpoints.{twin}] {its_name}; remove it from "
            "[[replicates]], or narrow the glob: a replicate is trained again with another seed"
        )


def check_replicate_runs(replicates: Sequence[RunRef], audited: Mapping[str, RunRef] | None = None) -> None:
    """Refuse runs that are no replicates, by their weights; by the run where its weights are unknown.

    Parameters
    ----------
    replicates : sequence of RunRef
        From the store and from floors.
    audited : mapping of role to RunRef, optional
        ``before`` and ``after``.

    Raises
    ------
    ConfigError
    """
    named = [*(audited or {}).items(), *((f"replicate-{i}", ref) for i, ref in enumerate(replicates))]
    check_replicates([(role, ref.checkpoint, ref.weights_digest or ref.run_id) for role, ref in named])
