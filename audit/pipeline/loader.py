"""The one checkpoint in memory: loaded when it is needed, freed before the next one comes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from audit.errors import CheckpointError
from audit.pipeline.plan import RunPlan
from audit.pipeline.sources import CheckpointSource
from audit.records import CaptureSettings, Checkpoint

if TYPE_CHECKING:
    from audit.capture import Opened


@dataclass(frozen=True)
class _Key:
    """What must be equal for a loaded checkpoint to serve a plan."""

    source: CheckpointSource
    device: str
    dtype: str
    attention_implementation: str

    @classmethod
    def of(cls, plan: RunPlan) -> _Key:
        settings = plan.spec.settings
        return cls(plan.source, plan.device, settings.dtype, settings.attention_implementation)


@dataclass
class Loader:
    """Keeps the last loaded checkpoint: one in memory at a time, base + adapter loaded once.

    Beside it lies what the shards of a run share: see :meth:`opened`.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    key: _Key | None = None
    checkpoint: Checkpoint | None = None
    _opened: dict[str, Opened] = field(default_factory=dict)

    def opened(self, plan: RunPlan) -> Opened:
        """Return where the shards of a run keep what they decide and verify once on the loaded checkpoint."""
        from audit.capture import Opened

        return self._opened.setdefault(plan.run_id, Opened())

    @contextmanager
    def use(self, plan: RunPlan) -> Iterator[Checkpoint]:
        """Yield the checkpoint of `plan`, loading it unless it is at hand.

        Raises
        ------
        CheckpointError
            When it cannot be loaded, or its files are no longer those that were planned.
        """
        with self.lock, ExitStack() as stack:
            yield self._at_hand(plan, stack) or self._load(plan)

    def _at_hand(self, plan: RunPlan, stack: ExitStack) -> Checkpoint | None:
        if self.checkpoint is None or self.key is None:
            return None
        wanted, digest = _Key.of(plan), plan.spec.checkpoint.digest
        if self.key == wanted and self.checkpoint.info.digest == digest:
            return self.checkpoint
        if self.key.source.adapter is None or _without_adapter(self.key) != wanted:
            return None
        base = _uncovered(self.checkpoint, stack)
        return base if base is not None and base.info.digest == digest else None

    def _load(self, plan: RunPlan) -> Checkpoint:
        if self.checkpoint is not None:  # free the old one before the new one comes
            self.checkpoint = self.key = None
            self._opened.clear()
            gc.collect()
        self.checkpoint, self.key = load_planned(plan), _Key.of(plan)
        return self.checkpoint


def _without_adapter(key: _Key) -> _Key:
    return replace(key, source=replace(key.source, adapter=None))


def _uncovered(checkpoint: Checkpoint, stack: ExitStack) -> Checkpoint | None:
    """Return the base under a loaded adapter until `stack` closes; None where that would not be exact."""
    from audit.models import adapter_disabled

    try:
        base = stack.enter_context(adapter_disabled(checkpoint))
    except CheckpointError:
        return None  # the adapter trained what cannot be switched off: load the base by itself
    return base if base.info.tokenizer_digest == checkpoint.info.tokenizer_digest else None


def load_planned(plan: RunPlan) -> Checkpoint:
    """Load the checkpoint of `plan`.

    Raises
    ------
    CheckpointError
        When it cannot be loaded, or its files are no longer those that were planned.
    """
    checkpoint = load(plan.source, plan.device, plan.spec.settings)
    if checkpoint.info.digest != plan.spec.checkpoint.digest:
        raise CheckpointError(
            f"checkpoint {plan.source.ref} was changed while it was audited; run the audit again"
        )
    return checkpoint


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


LOADER = Loader()
