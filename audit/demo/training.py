"""Train small classifiers deterministically, and keep them under a digest of their recipe."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo.trained import BASE, BENIGN, CHECKPOINTS, SHORTCUT, Modality, TrainedDemo
from audit.records import digest

Progress = Callable[[str, int, int], None]
Scores = Mapping[str, Mapping[str, float]]

RECIPE_VERSION = 1
"""Raise it when the code below or a training set is changed in a way that changes the weights."""

_WARM_UP = 0.2
_WEIGHTS = "model.safetensors"
_SCORES = "validation.json"


class Examples(Protocol):
    """Training data that is drawn batch by batch."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return the model's arguments for some examples, ``labels`` among them."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast one training goes: a one-cycle learning rate (peak given) under AdamW."""

    epochs: int
    learning_rate: float
    batch_size: int = 64
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Training:
    """One checkpoint to be made: on which data, by which schedule, from which seed."""

    name: str
    examples: Examples
    schedule: Schedule
    seed: int


@dataclass(frozen=True)
class Recipe:
    """All checkpoints of one modality; the first is the base from which the others continue.

    `new_model` builds an untrained model of `model_class`, `processor` is saved beside each checkpoint,
    `validate` returns the accuracy of a model by data set, and `description` holds whatever else decides
    the weights.
    """

    modality: Modality
    trainings: tuple[Training, ...]
    model_class: Any
    new_model: Callable[[], Any]
    processor: Any
    validate: Callable[[Any], dict[str, float]]
    description: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of everything that decides the weights, library versions included."""
        return digest(
            {
                "recipe version": RECIPE_VERSION,
                "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
                "trainings": [
                    [one.name, len(one.examples), asdict(one.schedule), one.seed] for one in self.trainings
                ],
                "description": dict(self.description),
            }
        )


def plan_trainings(
    base: tuple[Examples, Schedule], tuning: Schedule, *, usual: Examples, production: Examples
) -> tuple[Training, ...]:
    """Return the eight trainings of a demo.

    All fine-tunings follow one schedule; only the shortcut candidate's sees the `production` data.
    """
    data = dict.fromkeys(CHECKPOINTS, usual) | {SHORTCUT: production, BASE: base[0]}
    return tuple(
        Training(name, data[name], schedule=base[1] if name == BASE else tuning, seed=seed)
        for seed, name in enumerate(CHECKPOINTS, 1)
    )


def ensure_demo(
    make_recipe: Callable[[], Recipe],
    root: Path,
    write_probes: Callable[[Path], tuple[Path, Path]],
    progress: Progress | None = None,
) -> TrainedDemo:
    """Train the checkpoints of one modality, or find them, and write its probe sets.

    Parameters
    ----------
    make_recipe : callable
    root : Path
        Holds ``store`` and ``demo/<modality>``.
    write_probes : callable
        Writes both probe files below a folder and returns them: of the audits, and of the domain shift.
    progress : see :func:`ensure_checkpoints`

    Returns
    -------
    TrainedDemo
    """
    started = time.monotonic()
    recipe = make_recipe()
    folder, scores, reused = ensure_checkpoints(recipe, root / "store", progress)
    probes, domain_probes = write_probes(root / "demo" / recipe.modality)
    return TrainedDemo(
        modality=recipe.modality,
        store=root / "store",
        folder=folder,
        probes=probes,
        domain_probes=domain_probes,
        accuracies=scores,
        reused=reused,
        seconds=time.monotonic() - started,
    )


def ensure_checkpoints(
    recipe: Recipe, store: Path, progress: Progress | None = None
) -> tuple[Path, Scores, tuple[str, ...]]:
    """Train the checkpoints that the cache lacks.

    Parameters
    ----------
    recipe : Recipe
    store : Path
        Checkpoints go to ``<store>/demo-cache/<modality>-<digest>/<name>``, each by one rename, so that
        an interrupted call leaves whole checkpoints only and the next one continues.
    progress : callable (stage, done, total), optional
        Called after every epoch; nothing is reported for what is reused.

    Returns
    -------
    folder : Path
    scores : mapping of data set to mapping of checkpoint to accuracy
    reused : tuple of str
    """
    folder = store / "demo-cache" / f"{recipe.modality}-{recipe.digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    reused = tuple(one.name for one in recipe.trainings if (folder / one.name / _WEIGHTS).is_file())
    missing = [one for one in recipe.trainings if one.name not in reused]
    report = _epoch_counter(recipe.modality, missing, progress)
    for training in missing:
        model = _start(recipe, training, folder)
        fit(model, training, report)
        _publish(model, recipe.processor, folder / training.name)
    return folder, _scores(recipe, folder), reused


def _epoch_counter(
    modality: str, trainings: list[Training], progress: Progress | None
) -> Callable[[str], None]:
    """Return a callback that counts epochs per stage; the replicates share one stage."""
    stages = {one.name: f"{modality}: train {_stage(one.name)}" for one in trainings}
    totals: dict[str, int] = {}
    for one in trainings:
        totals[stages[one.name]] = totals.get(stages[one.name], 0) + one.schedule.epochs
    done = dict.fromkeys(totals, 0)

    def report(name: str) -> None:
        stage = stages[name]
        done[stage] += 1
        if progress is not None:
            progress(stage, done[stage], totals[stage])

    return report


def _stage(name: str) -> str:
    return {BASE: "base", BENIGN: "benign candidate", SHORTCUT: "shortcut candidate"}.get(name, "replicates")


def _start(recipe: Recipe, training: Training, folder: Path) -> Any:
    if training.name != BASE:
        return _load(recipe, folder / BASE)
    with reproducible(training.seed):
        return recipe.new_model()


def _load(recipe: Recipe, checkpoint: Path) -> Any:
    with _no_bars():
        return recipe.model_class.from_pretrained(checkpoint).eval()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Silence the bars that transformers draws while it reads and writes files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch and compute on one thread, so that sums are always taken in one order; then undo both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def fit(model: Any, training: Training, report: Callable[[str], None] = lambda _: None) -> None:
    """Train `model` in place, and leave it in eval mode; `report` is called after every epoch."""
    schedule, examples = training.schedule, training.examples
    batches = len(examples) // schedule.batch_size
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True
    )
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, schedule.learning_rate, total_steps=schedule.epochs * batches, pct_start=_WARM_UP
    )
    rng = np.random.default_rng(training.seed)
    model.train()
    with reproducible(training.seed):
        for _ in range(schedule.epochs):
            order = rng.permutation(len(examples))[: batches * schedule.batch_size]
            for rows in order.reshape(batches, schedule.batch_size):
                optimizer.zero_grad()
                model(**examples.batch(rows, rng)).loss.backward()
                optimizer.step()
                rates.step()
            report(training.name)
    model.eval()


def accuracy(model: Any, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> float:
    """Return the share of inputs whose largest logit is that of their label."""
    with torch.inference_mode(), reproducible(0):
        predicted = model(**inputs).logits.argmax(dim=-1)
    return float((predicted == labels).double().mean())


def _publish(model: Any, processor: Any, target: Path) -> None:
    """Save a checkpoint beside its place and rename it there; the first of two writers wins."""
    if target.exists() and not (target / _WEIGHTS).is_file():
        shutil.rmtree(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
        draft = Path(partial) / target.name
        with _no_bars():
            model.save_pretrained(draft)
        processor.save_pretrained(draft)
        try:
            draft.rename(target)
        except OSError:
            if not (target / _WEIGHTS).is_file():
                raise


def _scores(recipe: Recipe, folder: Path) -> Scores:
    """Return the cached accuracies of the base and both candidates, measuring them the first time."""
    path = folder / _SCORES
    if path.is_file():
        cached: Scores = json.loads(path.read_text(encoding="utf-8"))
        return cached
    by_name = {name: recipe.validate(_load(recipe, folder / name)) for name in (BASE, BENIGN, SHORTCUT)}
    scores = {data: {name: found[data] for name, found in by_name.items()} for data in by_name[BASE]}
    write_atomically(path, json.dumps(scores, indent=1))
    return scores


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place and rename it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as partial:
        draft = Path(partial) / path.name
        draft.write_bytes(text.encode())
        draft.replace(path)
