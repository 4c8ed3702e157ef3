"""`audit replicate`: train harmless replicates with a command that the configuration gives."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from audit.config import AuditConfig, ReplicateSection
from audit.errors import CheckpointError, ConfigError
from audit.models import checkpoint_info
from audit.pipeline.plan import Progress
from audit.records import CheckpointInfo

_TAIL_BYTES = 4000


def train_replicates(
    config: AuditConfig, *, folder: str | Path, progress: Progress | None = None
) -> dict[str, bool]:
    """Train every replicate that has a command and is not there yet.

    The command runs without a shell, in `folder`, with ``{seed}`` and ``{out}`` filled in; it trains into
    a folder beside the final one, which takes its name only when a checkpoint is in it.

    Parameters
    ----------
    config : AuditConfig
    folder : path
        Where the commands run: the folder of the configuration file.
    progress : callable, optional

    Returns
    -------
    dict
        Path of each replicate → whether it was trained now (False: it was there).

    Raises
    ------
    ConfigError
        When no replicate has a command.
    CheckpointError
        When a command fails, leaves no checkpoint, or gives the weights of another replicate.
    """
    sections = [section for section in config.replicates if section.command is not None]
    if not sections:
        raise ConfigError(
            'no [[replicates]] has a command; add command = "python train.py --seed {seed} --out {out}"'
        )
    trained: dict[str, bool] = {}
    known = dict(_others(config))
    for done, section in enumerate(sections):
        out = Path(str(section.path))
        if progress is not None:
            progress("train replicates", done, len(sections))
        fresh = not out.exists()
        if fresh:
            _train(section, out, Path(folder))
        info = _checkpoint(out, section)
        twin = known.setdefault(info.weights_digest, str(out))
        if twin != str(out):
            raise CheckpointError(
                f"{out} has the same weights as {twin}, so that it shows no spread; let the training command "
                "use {seed}" + (f", and delete {out}" if fresh else "")
            )
        trained[str(out)] = fresh
    if progress is not None:
        progress("train replicates", len(sections), len(sections))
    return trained


def _others(config: AuditConfig) -> Iterator[tuple[str, str]]:
    """Yield digest and path of the checkpoints before and after, where they are on this machine."""
    for source in config.checkpoints.values():
        if source.path is None:
            continue
        try:
            info = checkpoint_info(source.path, revision=source.revision, adapter=source.adapter)
        except CheckpointError:
            continue
        yield info.weights_digest, source.path


def _train(section: ReplicateSection, out: Path, folder: Path) -> None:
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = training_command(section, partial)
    environment = {**os.environ, "ROLLOUT_AUDIT_SEED": str(_seed(section))}
    log = out.with_name(f"{out.name}.log")
    try:
        with log.open("wb") as file:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode != 0:
            raise CheckpointError(
                f"training seed {_seed(section)} ended with {done.returncode}: {_last_line(log)}; see {log}"
            )
        _checkpoint(partial, section)
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(
            f"training seed {_seed(section)}: {command[0]} cannot be run ({error.strerror}); "
            "mend replicates.command"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def training_command(section: ReplicateSection, out: Path) -> list[str]:
    """Return the words of a section's command with seed and folder filled in.

    ``python`` is the interpreter that runs the audit, so that the training finds the same packages.

    Raises
    ------
    ConfigError
        When the command has other placeholders, or quotes that do not close.
    """
    try:
        words = shlex.split(str(section.command))
        filled = [word.format(seed=_seed(section), out=out) for word in words]
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"replicates.command cannot be filled in ({error}); it knows {{seed}} and {{out}} alone"
        ) from None
    return [sys.executable, *filled[1:]] if filled[0] == "python" else filled


def _seed(section: ReplicateSection) -> int:
    seeds = section.seeds
    return seeds[0] if isinstance(seeds, list) else seeds


def _checkpoint(path: Path, section: ReplicateSection) -> CheckpointInfo:
    try:
        return checkpoint_info(str(path), adapter=section.adapter)
    except CheckpointError as error:
        raise CheckpointError(
            f"training seed {_seed(section)} left no checkpoint: {error}; let the command save to {{out}}"
        ) from None


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
