"""One input through the checkpoints of stored runs, at once: what the dashboard computes on demand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from audit._method_parameters import PARAMETERS, TARGETED
from audit.errors import CheckpointError
from audit.pipeline.specs import target_of
from audit.records import Captured, Checkpoint, Method, Probe, RunSpec

BYTES_PER_PARAMETER = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Of weights; what a pass needs besides is small for one short input."""

PER_HEAD = "per_head_rollout"
SECONDS = 20.0
"""What attention flow may take on one input, which somebody waits for."""

LIVE_METHODS = tuple(name for name in PARAMETERS if name != PER_HEAD)
"""Methods that can be asked for on demand; single heads are asked for by their index."""


def memory_estimate(*specs: RunSpec) -> float:
    """Return the gigabytes that the checkpoints of these runs take together.

    Examples
    --------
    >>> memory_estimate()
    0.0
    """
    sizes = (one.checkpoint.parameters * BYTES_PER_PARAMETER.get(one.settings.dtype, 4) for one in specs)
    return sum(sizes) / 1e9


def free_memory() -> float | None:
    """Return the gigabytes of memory that nothing uses, None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (AttributeError, OSError, ValueError):
        return None


def load_run_checkpoint(spec: RunSpec) -> Checkpoint:
    """Load the checkpoint that a run was captured from, on the CPU.

    Raises
    ------
    CheckpointError
        When it is no longer there, or its files are not those of the run.
    """
    from audit.models import load_checkpoint

    info, kernel = spec.checkpoint, spec.settings.attention_implementation
    found = load_checkpoint(
        info.ref,
        device="cpu",
        dtype=spec.settings.dtype,
        adapter=info.adapter,
        revision=info.revision,
        attention_implementation=None if kernel == "auto" else kernel,
    )
    if found.info.digest != info.digest:
        raise CheckpointError(
            f"{info.ref} is not the checkpoint of {spec.id} any more (digest {found.info.digest[:12]}, then "
            f"{info.digest[:12]}); restore its files, or audit it again"
        )
    return found


def head_count(checkpoint: Checkpoint) -> int:
    """Return how many attention heads a layer has, 0 where the configuration does not say."""
    config = checkpoint.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(config, "num_attention_heads", 0) or 0)


def method_on_demand(stored: Method, *, name: str | None = None, row: str | None = None,
                     head: int | None = None) -> Method:  # fmt: skip
    """Return the method of a run with another name, output row, or a single head.

    Parameters
    ----------
    stored : Method
        Of the run; its parameters are kept as far as the new method takes them.
    name, row : str, optional
    head : int, optional
        From 0; the head of the last layer over the merged layers below.

    Examples
    --------
    >>> method_on_demand(Method(params={"residual": 0.4, "top_k": 8}), head=2)
    Method(name='per_head_rollout', row='auto', params={'residual': 0.4, 'head': 2})
    """
    name = PER_HEAD if head is not None else name or stored.name
    kept = {key: value for key, value in stored.params.items() if key in PARAMETERS[name]}
    if head is not None:
        kept["head"] = head
    if name == "attention_flow":
        kept["max_seconds"] = SECONDS
    return Method(name, row or stored.row, kept)


def capture_one(
    checkpoint: Checkpoint,
    spec: RunSpec,
    probe: Probe,
    *,
    method: Method | None = None,
    target: Any = None,
) -> Captured:
    """Return maps and prediction of one input, with the settings of a run.

    Parameters
    ----------
    checkpoint : Checkpoint
    spec : RunSpec
    probe : Probe
        Its content, and the annotations that the output row needs.
    method : Method, optional
        Default: that of the run.
    target : class name, or two names, optional
        What gradient methods explain; default what the run explains.

    Raises
    ------
    ProbeError, CaptureError
    """
    from audit.capture import capture

    settings = replace(spec.settings, stride=None)  # one input is never cut into windows
    wanted = target if target is not None else target_of(spec.target)
    found = capture(checkpoint, [probe], method=method or spec.method, settings=settings, target=wanted)
    return next(iter(found))


def capture_both(
    checkpoints: Sequence[Checkpoint],
    specs: Sequence[RunSpec],
    probe: Probe,
    *,
    method: Method | None = None,
) -> tuple[Captured, Captured]:
    """Return what two checkpoints make of one input; gradient methods explain one class on both.

    Where neither the run nor a label says which class, it is the one that the first checkpoint predicts.

    Raises
    ------
    ProbeError, CaptureError
    """
    target = None
    unknown = target_of(specs[0].target) in (None, "label") and probe.label is None
    if unknown and (method or specs[0].method).name in TARGETED:
        target = capture_one(checkpoints[0], specs[0], probe, method=Method()).prediction.predicted
    found = [
        capture_one(one, spec, probe, method=method, target=target)
        for one, spec in zip(checkpoints, specs, strict=True)
    ]
    return found[0], found[1]


def memory_obstacle(*specs: RunSpec, limit: float) -> str | None:
    """Return why the checkpoints of these runs may not be loaded together, None where they may.

    Parameters
    ----------
    specs : RunSpec
    limit : float
        Gigabytes that they may take together.
    """
    need, free = memory_estimate(*specs), free_memory()
    if need > limit:
        return f"both checkpoints together need about {need:.1f} GB, more than the {limit:g} GB allowed"
    if free is not None and need > free:
        return f"both checkpoints together need about {need:.1f} GB, and {free:.1f} GB of memory are free"
    return None
