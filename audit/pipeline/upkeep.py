"""Remove from a store what nobody needs, and tell what stays and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from audit.config import AuditConfig
from audit.errors import AuditError, ConfigError
from audit.pipeline.floor import read_floor
from audit.pipeline.plan import plan_run
from audit.pipeline.sources import sources
from audit.store import Store


@dataclass(frozen=True)
class Upkeep:
    """What was removed, or would be, and what stays.

    Attributes
    ----------
    removed : tuple of {"id", "path", "reason"}
        ``unfinished`` or ``unreferenced``.
    kept : tuple of {"id", "reason"}
        Every run that stays.
    done : bool
        False where it was only told.
    """

    removed: tuple[dict[str, str], ...]
    kept: tuple[dict[str, str], ...]
    done: bool


def tidy_store(
    store: Store,
    configs: Sequence[AuditConfig] = (),
    *,
    unreferenced_days: float = 90,
    unfinished_days: float = 7,
    remove: bool = False,
) -> Upkeep:
    """Remove old runs that nothing refers to, and unfinished work that nobody goes on with.

    What a comparison, an approval (a baseline is one) or another kept run needs stays, whatever its age, and
    so does what `configs` name: runs, the runs of floors, and the runs that their checkpoints have.

    Parameters
    ----------
    store : Store
    configs : sequence of AuditConfig
    unreferenced_days, unfinished_days : float
        Nothing younger is removed.
    remove : bool
        False only tells.

    Raises
    ------
    ConfigError
        When an age is negative.
    StoreError
        When a manifest cannot be read, in which case nothing is removed.
    """
    if min(unreferenced_days, unfinished_days) < 0:
        raise ConfigError("an age in days is negative; give 0 or more")
    keep = sorted({name for config in configs for name in _named(config)})
    removed = store.gc(
        unfinished_after=timedelta(days=unfinished_days),
        unreferenced_after=timedelta(days=unreferenced_days),
        keep=keep,
        dry_run=not remove,
    )
    stays = store.kept(removed=[one["id"] for one in removed], keep=keep)
    return Upkeep(tuple(removed), tuple(stays), remove)


def _named(config: AuditConfig) -> Iterator[str]:
    """Yield the runs that a configuration names, or would capture or find."""
    for section in config.replicates:
        if section.floor is not None:
            floor = read_floor(section.floor)
            yield from (run.ref.run_id for run in (floor.baseline, *floor.replicates))
    for role, source in sources(config):
        if source.run is not None:
            yield source.run
        for domain in (False, True) if source.path is not None else ():
            try:
                yield plan_run(config, role, domain=domain).run_id
            except AuditError:
                continue  # its checkpoint or probes are not on this machine, so that it names no run
