"""Run the plans: capture shard by shard into the store, publish when all shards are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from audit.errors import CheckpointError, ProbeError
from audit.pipeline.plan import CheckpointSource, Progress, RunPlan, load_probes
from audit.probes import load_annotations
from audit.records import Captured, CaptureSettings, Checkpoint, Probe, Region, Reliance
from audit.regions import check_regions_match, reliance
from audit.store import Store


@dataclass
class _Loader:
    """Keeps the last loaded checkpoint: one in memory at a time, base + adapter loaded once."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    key: tuple[Any, ...] | None = None
    checkpoint: Checkpoint | None = None

    @contextmanager
    def use(self, source: CheckpointSource, device: str, settings: CaptureSettings) -> Iterator[Checkpoint]:
        """Yield the checkpoint of `source`, loading it unless it is at hand."""
        with self.lock, ExitStack() as stack:
            key = (source, device, settings.dtype, settings.attention_implementation)
            base = self._base_of_current(key, stack)
            if base is not None:
                yield base
                return
            if self.checkpoint is None or self.key != key:
                self.checkpoint = self.key = None  # free the old one before the new one comes
                self.checkpoint = load(source, device, settings)
                self.key = key
            yield self.checkpoint

    def _base_of_current(self, key: tuple[Any, ...], stack: ExitStack) -> Checkpoint | None:
        """Return the wanted base where it lies under the loaded adapter and can be uncovered exactly."""
        from audit.models import adapter_disabled

        if self.key is None or self.checkpoint is None or self.key[1:] != key[1:]:
            return None
        current = self.key[0]
        if current.adapter is None or replace(current, adapter=None) != key[0]:
            return None
        try:
            base = stack.enter_context(adapter_disabled(self.checkpoint))
        except CheckpointError:
            return None  # the adapter trained what cannot be switched off: load the base by itself
        return base if base.info.tokenizer_digest == self.checkpoint.info.tokenizer_digest else None


LOADER = _Loader()


def load(source: CheckpointSource, device: str, settings: CaptureSettings) -> Checkpoint:
    """Load the checkpoint of `source` with the dtype and kernel of `settings`."""
    from audit.models import load_checkpoint

    kernel = settings.attention_implementation
    return load_checkpoint(
        source.ref,
        device=device,
        dtype=settings.dtype,
        adapter=source.adapter,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        attention_implementation=None if kernel == "auto" else kernel,
    )


def capture_all(plans: Sequence[RunPlan], *, progress: Progress | None = None) -> dict[str, str]:
    """Capture every plan that the store does not hold yet; see :func:`capture_run`.

    Returns
    -------
    dict
        Role → run id.
    """
    return {plan.role: capture_run(plan, progress=progress) for plan in plans}


def capture_run(plan: RunPlan, *, progress: Progress | None = None) -> str:
    """Capture one run into its store, resuming where an earlier attempt stopped.

    A run that is already stored is left as it is; one that differs only in its regions is derived
    from the stored maps.

    Parameters
    ----------
    plan : RunPlan
    progress : callable, optional

    Returns
    -------
    str
        The run's id.

    Raises
    ------
    CheckpointError, ProbeError, CaptureError, StoreError
    """
    store = Store(plan.store)
    if store.has_run(plan.run_id):
        return plan.run_id
    finished = store.begin_run(plan.spec, len(plan.shards)).finished_shards()
    if not finished:
        check_run(plan)
    for index, (start, _) in enumerate(plan.shards):
        if index not in finished:
            capture_shard(plan, index, progress=_offset(progress, plan, start))
    return publish_run(plan)


def check_run(plan: RunPlan) -> None:
    """Refuse before the first shard what would fail later: empty regions, long probes, no determinism.

    Raises
    ------
    ProbeError
        Naming every region that no probe has, or every probe that is longer than the checkpoint allows.
    CaptureError
        When the same probe twice through the checkpoint gives two maps.
    """
    probes = load_probes(plan.probes).probes
    try:
        check_regions_match(plan.spec.regions, probes)
    except ValueError as error:
        raise ProbeError(f"{plan.probes.path}: {error}") from None
    with LOADER.use(plan.source, plan.device, plan.spec.settings) as checkpoint:
        from audit.capture import check_determinism, check_probes

        check_probes(checkpoint, probes, plan.spec.settings)
        check_determinism(checkpoint, probes, method=plan.spec.method, settings=plan.spec.settings)


def capture_shard(plan: RunPlan, index: int, *, progress: Progress | None = None) -> None:
    """Capture one shard of a run and write its parts atomically.

    Parameters
    ----------
    plan : RunPlan
    index : int
        Which of ``plan.shards``.
    progress : callable, optional
        Counts the probes of this shard.
    """
    start, stop = plan.shards[index]
    probes = load_probes(plan.probes).probes[start:stop]
    writer = Store(plan.store).begin_run(plan.spec, len(plan.shards))
    with LOADER.use(plan.source, plan.device, plan.spec.settings) as checkpoint:
        from audit.capture import capture

        captured = list(
            capture(
                checkpoint,
                probes,
                method=plan.spec.method,
                settings=plan.spec.settings,
                target=_target(plan.spec.target),
                progress=_shard_progress(progress, plan.role, len(probes)),
            )
        )
    annotated = [annotate(item, probe) for item, probe in zip(captured, probes, strict=True)]
    writer.write_shard(index, annotated, _reliance(annotated, probes, plan.spec.regions))


def publish_run(plan: RunPlan) -> str:
    """Write the manifest of a run whose shards are all there.

    Returns
    -------
    str
        The run's id.

    Raises
    ------
    ProbeError
        When a region matches nothing in any probe.
    """
    store = Store(plan.store)
    if not store.has_run(plan.run_id):
        writer = store.begin_run(plan.spec, len(plan.shards))
        writer.publish(counts={"probes": plan.n_probes}, diagnostics={})
    return plan.run_id


def annotate(captured: Captured, probe: Probe) -> Captured:
    """Return `captured` with the probe's label, group and segments beside its prediction."""
    label = None if probe.label is None else str(probe.label)
    prediction = replace(
        captured.prediction,
        label=captured.prediction.label or label,
        group=probe.group,
        segments=dict(probe.segments),
    )
    return replace(captured, prediction=prediction)


def _reliance(
    captured: Sequence[Captured], probes: Sequence[Probe], regions: Sequence[Region]
) -> Iterator[Reliance]:
    for item, probe in zip(captured, probes, strict=True):
        for one_map in item.maps:
            try:
                yield from reliance(one_map, load_annotations(probe), regions)
            except ValueError as error:
                raise ProbeError(f"probe {probe.id}: {error}") from None


def _target(name: str) -> str | None:
    return None if name == "auto" else name


def _offset(progress: Progress | None, plan: RunPlan, start: int) -> Progress | None:
    if progress is None:
        return None
    return lambda stage, done, _: progress(stage, start + done, plan.n_probes)


def _shard_progress(progress: Progress | None, role: str, total: int) -> Any:
    if progress is None:
        return None
    return lambda done: progress(f"capture {role}", done, total)
