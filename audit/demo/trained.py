"""What a finished training leaves: where each checkpoint lies, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Modality = Literal["vision", "text"]

BASE, BENIGN, SHORTCUT = "base", "benign", "shortcut"
REPLICATES = tuple(f"seed-{number}" for number in range(1, 6))
CHECKPOINTS = (BASE, *REPLICATES, BENIGN, SHORTCUT)


@dataclass(frozen=True)
class TrainedDemo:
    """The checkpoints, probe files and accuracies of one modality.

    Attributes
    ----------
    modality : "vision" or "text"
    store : Path
        Store of the audits; the checkpoints lie in its ``demo-cache``.
    folder : Path
        Holds one directory per checkpoint: ``base``, ``seed-1`` to ``seed-5`` (the replicates),
        ``benign`` and ``shortcut``, each with its processor or tokenizer.
    probes, domain_probes : Path
        Probe files of the audits and of the domain shift.
    accuracies : mapping of data to mapping of checkpoint to share
        Validation accuracy of ``base``, ``benign`` and ``shortcut``: on ``production`` data, where the
        shortcut holds, and on ``clean`` data, where it does not; other keys are for the curious.
    reused : tuple of str
        Checkpoints that an earlier call had trained.
    seconds : float
        Wall time of this call.
    """

    modality: Modality
    store: Path
    folder: Path
    probes: Path
    domain_probes: Path
    accuracies: Mapping[str, Mapping[str, float]]
    reused: tuple[str, ...]
    seconds: float

    @property
    def base(self) -> Path:
        """Return the checkpoint from which all others were fine-tuned."""
        return self.folder / BASE

    @property
    def replicates(self) -> tuple[Path, ...]:
        """Return the harmless re-trainings (kind ``seed``)."""
        return tuple(self.folder / name for name in REPLICATES)

    @property
    def benign(self) -> Path:
        """Return the candidate that is one more harmless re-training."""
        return self.folder / BENIGN

    @property
    def shortcut(self) -> Path:
        """Return the candidate that learnt the shortcut."""
        return self.folder / SHORTCUT

    def story_lines(self) -> tuple[str, ...]:
        """Return what a user should read beside the verdicts: accuracies, and what was reused."""
        return (*self._accuracy_lines(), self._origin_line())

    def _accuracy_lines(self) -> tuple[str, ...]:
        production, clean = self.accuracies["production"], self.accuracies["clean"]
        return tuple(
            f"{self.modality}, {name} candidate: validation accuracy in production {production[BASE]:.0%} → "
            f"{production[name]:.0%}, on clean data {clean[BASE]:.0%} → {clean[name]:.0%}"
            for name in (SHORTCUT, BENIGN)
        )

    def _origin_line(self) -> str:
        trained = len(CHECKPOINTS) - len(self.reused)
        if not trained:
            return f"{self.modality}: reused all {len(CHECKPOINTS)} checkpoints in {self.folder}"
        reused = f", reused {len(self.reused)}" if self.reused else ""
        took = f"{self.seconds:.0f} s{reused}"
        return f"{self.modality}: trained {trained} checkpoints in {took}; they are in {self.folder}"
