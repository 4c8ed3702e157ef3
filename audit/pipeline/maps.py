"""Maps and reliance straight from a loaded checkpoint, without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from audit.probes import as_probes, load_annotations, read_probes
from audit.records import (
    CaptureSettings,
    Checkpoint,
    FloatArray,
    Map,
    Method,
    Positions,
    Probe,
    ProbeSet,
    Region,
    Reliance,
)
from audit.regions import column_reliance, expand_regions, parse_regions, region_columns, reliance

Probes = ProbeSet | str | Path | Iterable[Probe | str | Mapping[str, Any]]


def compute_maps(
    checkpoint: Checkpoint,
    probes: Probes,
    *,
    method: str | Method = "rollout",
    row: str = "auto",
    target: Any = None,
    settings: CaptureSettings | None = None,
    **params: Any,
) -> Iterator[Map]:
    """Yield the maps of each probe, in the order of the probes.

    Parameters
    ----------
    checkpoint : Checkpoint
        From :func:`audit.load_checkpoint`.
    probes : ProbeSet, path, or iterable of Probe, text or mapping
    method : str or Method
        Name of the method; `params` are its parameters, for example ``residual=0.5``.
    row : str
        Output row that is read.
    target : str, int or sequence, optional
        Target class of gradient methods: its name or index, or two names whose logits are subtracted; else
        each probe's own label, by name or index.
    settings : CaptureSettings, optional

    Yields
    ------
    Map
        One for each probe × stream; weights sum to 1.

    Raises
    ------
    ConfigError
        When the method, one of its parameters, the row or the target is unknown or out of range.
    ProbeError, CheckpointError, CaptureError
    """
    from audit.capture import capture

    record = method if isinstance(method, Method) else Method(method, row, params)
    items = as_probe_list(probes)
    for captured in capture(
        checkpoint, items, method=record, settings=settings or CaptureSettings(), target=target
    ):
        yield from captured.maps


def compute_maps_by_method(
    checkpoint: Checkpoint,
    probes: Probes,
    methods: str | Method | Sequence[str | Method],
    *,
    row: str = "auto",
    target: Any = None,
    settings: CaptureSettings | None = None,
) -> Iterator[tuple[Map, ...]]:
    """Yield the maps of each probe by several methods; those that read attention alone share a forward pass.

    Parameters
    ----------
    checkpoint, probes, target, settings : see :func:`compute_maps`
    methods : str or Method, or sequence of them
        With one output row.
    row : str
        Output row of methods that are given by name.

    Yields
    ------
    tuple of Map
        One tuple for each probe × stream, in the order of `methods`.

    Raises
    ------
    ConfigError, ProbeError, CaptureError

    Notes
    -----
    Rollout with any fusion or pruning of heads, rollout of single heads, raw attention and attention flow
    are folds of the same weights; every other method takes its own passes.
    """
    from audit.capture.together import capture_methods

    given = [methods] if isinstance(methods, str | Method) else methods
    records = [one if isinstance(one, Method) else Method(one, row) for one in given]
    items = as_probe_list(probes)
    for each in capture_methods(checkpoint, items, records, settings=settings, target=target):
        yield from zip(*(one.maps for one in each), strict=True)


def compute_reliance(
    checkpoint: Checkpoint,
    probes: Probes,
    regions: Mapping[str, Any] | Sequence[Region] = (),
    *,
    method: str | Method = "rollout",
    row: str = "auto",
    target: Any = None,
    settings: CaptureSettings | None = None,
    engine: Literal["auto", "dense", "linear"] = "auto",
    **params: Any,
) -> Iterator[Reliance]:
    """Yield the reliance of each probe on each region; no map outlives its probe.

    Parameters
    ----------
    regions : mapping as in ``[regions]`` of audit.toml, or sequence of Region
        Annotated and automatic regions (``special``, ``first``) are added.
    engine : "auto", "dense" or "linear"
        ``linear`` carries the regions through the model's own fused attention in memory linear in the
        number of positions, for plain rollout with a constant residual; where it cannot, it warns with
        the reason and gives what ``dense`` gives. ``auto`` takes it from 1024 positions on. Both agree
        within rounding.

    The other parameters are those of :func:`compute_maps`.

    Yields
    ------
    Reliance
        One for each probe × stream × region.

    Raises
    ------
    ConfigError, ProbeError, CheckpointError, CaptureError
        As :func:`compute_maps`.
    """
    from audit.capture.region_session import RegionMasses, capture_regions

    items = as_probe_list(probes)
    given = parse_regions(regions) if isinstance(regions, Mapping) else tuple(regions)
    every = expand_regions(given, items)
    annotated = {probe.id: probe for probe in items}
    if engine not in ("auto", "dense", "linear"):
        raise ValueError(f"engine: expected 'auto', 'dense' or 'linear', got {engine!r}")
    record = method if isinstance(method, Method) else Method(method, row, params)
    columns = _columns(every)
    for found in capture_regions(
        checkpoint, items, columns, engine=engine, method=record, settings=settings, target=target
    ):
        if isinstance(found, RegionMasses):
            probe = load_annotations(annotated[found.probe_id])
            yield from column_reliance(found.masses, found.positions, probe, every)
            continue
        for one in found.maps:
            yield from reliance(one, load_annotations(annotated[one.probe_id]), every)


def _columns(regions: Sequence[Region]) -> Callable[[Probe, Positions], FloatArray]:
    return lambda probe, positions: region_columns(
        positions, load_annotations(probe), regions, width=len(regions) + 2
    )


def as_probe_list(probes: Probes) -> tuple[Probe, ...]:
    """Return probes in any of the accepted forms as records."""
    if isinstance(probes, ProbeSet):
        return probes.probes
    if isinstance(probes, str | Path):
        return read_probes(probes).probes
    return as_probes(probes).probes
