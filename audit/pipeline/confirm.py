"""Confirm a shifted region by occluding it on both checkpoints: the causal check beside the map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from audit.compare import mean_interval
from audit.config import AuditConfig
from audit.pipeline.capture import _LOADER
from audit.pipeline.plan import Progress, RunPlan, load_probes, plan_run
from audit.probes import load_annotations
from audit.records import Confirmation, Outcome, Verdict
from audit.regions import region_weights

NOT_OCCLUDED = frozenset({"*", "special", "first", "rest"})
"""Regions that hold no content of their own to remove."""


def confirm_regions(
    config: AuditConfig, verdict: Verdict, *, progress: Progress | None = None
) -> tuple[Confirmation, ...]:
    """Occlude each failing region on both checkpoints and compare the change of the target logit.

    Parameters
    ----------
    config : AuditConfig
        Both checkpoints must be given by path.
    verdict : Verdict
        Its failing rules name the regions.
    progress : callable, optional

    Returns
    -------
    tuple of Confirmation
        Empty where a checkpoint has no task head, or is not at hand.

    Raises
    ------
    CheckpointError, CaptureError
    """
    failing = (rule for rule in verdict.rules if rule.outcome is Outcome.FAIL)
    names = [name for name in dict.fromkeys(rule.region for rule in failing) if name not in NOT_OCCLUDED]
    if not names or any(config.checkpoints[role].path is None for role in ("before", "after")):
        return ()
    before, after = plan_run(config, "before"), plan_run(config, "after")
    return tuple(
        found for name in names if (found := _confirm(before, after, name, config, progress)) is not None
    )
