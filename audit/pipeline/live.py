"""One input through the checkpoints of stored runs, at once: what the dashboard's live page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from audit.errors import CheckpointError
from audit.records import Captured, Checkpoint, Probe, RunSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES_PER_PARAMETER = 4
"""Of float32 weights; what a pass needs besides is small for one short input."""


def memory_estimate(*specs: RunSpec) -> float:
    """Return the gigabytes that the checkpoints of these runs take together.

    Examples
    --------
    >>> memory_estimate()
    0.0
    """
    return sum(spec.checkpoint.parameters for spec in specs) * BYTES_PER_PARAMETER / 1e9


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


def capture_one(
    checkpoint: Checkpoint,
    spec: RunSpec,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    image: NDArray[Any] | None = None,
) -> Captured:
    """Return maps and prediction of one input, with the method and settings of a run.

    Parameters
    ----------
    checkpoint : Checkpoint
    spec : RunSpec
    text, text_pair : str, optional
    image : uint8 array (height, width, 3), optional

    Raises
    ------
    ProbeError, CaptureError
    """
    from audit.capture import capture

    probe = Probe("live", text=text, text_pair=text_pair, image=image)
    return next(iter(capture(checkpoint, [probe], method=spec.method, settings=spec.settings)))
