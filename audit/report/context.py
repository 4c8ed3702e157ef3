"""What a report prints that neither the comparison nor the verdict knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from audit.records import CheckpointInfo


@dataclass(frozen=True)
class ReportContext:
    """Provenance of a report; every field may be left out.

    Attributes
    ----------
    title : str or None
        Name of the audit, for example the name of its configuration file.
    created : str or None
        When the verdict was read, as it shall be printed.
    before, after : CheckpointInfo or None
        Identity of the two checkpoints, beyond what the comparison holds.
    probes, domain : str or None
        Where the probe sets were read from.
    inputs_digest, annotations_digest : str or None
        Digests of the probe set.
    versions : mapping of package name to version
    log_head : str or None
        Digest of the newest entry of the store's log.
    attempt : int or None
        How often this pair was judged under any policy, the present time included.
    loosened_since : str or None
        When the policy was last made more permissive, if it was.
    report : str or None
        Where the HTML report lies; printed by text and Markdown.
    notes : tuple of str
        Further lines, printed as they are.
    """

    title: str | None = None
    created: str | None = None
    before: CheckpointInfo | None = None
    after: CheckpointInfo | None = None
    probes: str | None = None
    domain: str | None = None
    inputs_digest: str | None = None
    annotations_digest: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    log_head: str | None = None
    attempt: int | None = None
    loosened_since: str | None = None
    report: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def log_lines(self) -> tuple[str, ...]:
        """Return what the append-only log has to say about this verdict, one sentence each.

        Examples
        --------
        >>> ReportContext(log_head="5f3a", attempt=3).log_lines
        ('Attempt 3 for this pair.', 'Log head 5f3a.')
        """
        lines = []
        if self.attempt is not None and self.attempt > 1:
            lines.append(f"Attempt {self.attempt} for this pair.")
        if self.loosened_since:
            lines.append(f"Policy loosened since {self.loosened_since}.")
        if self.log_head:
            lines.append(f"Log head {self.log_head}.")
        return tuple(lines)
