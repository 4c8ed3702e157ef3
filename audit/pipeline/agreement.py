"""How far the stored maps of a run agree with the annotated regions of its probes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from audit.agreement import Agreement, map_agreement
from audit.config import AuditConfig
from audit.errors import AuditError, ProbeError
from audit.pipeline.sources import load_probes, probe_source
from audit.probes import load_annotations
from audit.records import Comparison, Map, Probe, ProbeSet, Region
from audit.store import Store


@dataclass(frozen=True)
class RegionAgreement:
    """Means over the probes of a run that have the region; None where no probe has it.

    Attributes
    ----------
    pointing, iou, auprc : float or None
        See :mod:`audit.agreement`; `pointing` is the accuracy of the pointing game.
    size : float or None
        Mean share of the content that the region covers: `pointing` and `auprc` of a uniform map.
    n_probes, n_missing : int
        Probes that count, and probes without the region or without mass on content.
    """

    region: str
    stream: str
    pointing: float | None
    iou: float | None
    auprc: float | None
    size: float | None
    n_probes: int
    n_missing: int


def region_agreement(store: Store, run_id: str, probes: ProbeSet) -> tuple[RegionAgreement, ...]:
    """Return how far the maps of a stored run agree with each annotated region.

    Parameters
    ----------
    store : Store
    run_id : str
    probes : ProbeSet
        The probe set that the run was captured on; it holds the annotations.

    Returns
    -------
    tuple of RegionAgreement
        One for each annotated region × stream; empty where no region is annotated.

    Raises
    ------
    ProbeError
        When the probe set is another than the run's.
    StoreError
        When the run is missing or damaged.
    """
    spec = store.spec(run_id)
    captured_on = (spec.inputs_digest, spec.annotations_digest)
    if (probes.inputs_digest, probes.annotations_digest) != captured_on:
        raise ProbeError(
            f"{probes.source or 'the probe set'} is not what {run_id} was captured on; name that"
        )
    regions = [region for region in spec.regions if region.kind == "annotated"]
    if not regions:
        return ()
    by_place: dict[tuple[str, str], list[Agreement]] = {}
    for one in _agreements(store.iter_maps(run_id), probes, regions):
        by_place.setdefault((one.region, one.stream), []).append(one)
    return tuple(_mean(region, stream, found) for (region, stream), found in by_place.items())


def agreement_notes(store: Store, comparison: Comparison, config: AuditConfig | None) -> tuple[str, ...]:
    """Return one line for each annotated region: both checkpoints' agreement with it.

    Nothing where the configuration names no probe set that the runs were captured on.
    """
    one, two = comparison.before, comparison.after
    if config is None or comparison.kind != "paired" or one is None or two is None:
        return ()
    if not (store.has_run(one.run_id) and store.has_run(two.run_id)):
        return ()
    try:
        probes = load_probes(probe_source(config))
        before, after = (region_agreement(store, ref.run_id, probes) for ref in (one, two))
    except AuditError:
        return ()  # the probe file was edited or moved; the report is still written
    pairs = {(new.region, new.stream): new for new in after}
    return tuple(
        _line(old, pairs[old.region, old.stream])
        for old in before
        if old.n_probes and (old.region, old.stream) in pairs
    )


def _agreements(maps: Iterable[Map], probes: ProbeSet, regions: Sequence[Region]) -> Iterator[Agreement]:
    by_id = {probe.id: probe for probe in probes}
    loaded: Probe | None = None
    for one in maps:
        if loaded is None or loaded.id != one.probe_id:  # the streams of one probe follow each other
            loaded = load_annotations(by_id[one.probe_id])
        yield from map_agreement(one, loaded, regions)


def _mean(region: str, stream: str, found: Sequence[Agreement]) -> RegionAgreement:
    defined = [one for one in found if one.reason is None]
    pointing, iou, auprc, size = (
        _average(getattr(one, name) for one in defined) for name in ("pointing", "iou", "auprc", "size")
    )
    counts = len(defined), len(found) - len(defined)
    return RegionAgreement(region, stream, pointing, iou, auprc, size, *counts)


def _average(values: Iterable[float]) -> float | None:
    given = list(values)
    return fmean(given) if given else None


def _line(before: RegionAgreement, after: RegionAgreement) -> str:
    """Return both means of one region as a sentence."""
    where = before.region if before.stream == "input" else f"{before.region} ({before.stream})"
    parts = [
        f"{name} {_number(getattr(before, key))} → {_number(getattr(after, key))}"
        for key, name in (("pointing", "pointing game"), ("iou", "IoU at area"), ("auprc", "AUPRC"))
    ]
    chance = f"a uniform map has a pointing game and AUPRC of {_number(before.size)}"
    return f"Agreement with {where}: {', '.join(parts)} ({chance}; {before.n_probes:,} probes)."


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
