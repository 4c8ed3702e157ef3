"""Train the checkpoints of one base, or find them in the cache."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from audit.demo.training import Examples, Schedule, Training, fit, reproducible
from audit.records import digest
from tests.benchmarks.shift.families import BaseData, Family

RECIPE_VERSION = 1
"""Raise it when the code here or in a family is changed in a way that changes the weights."""

REPLICATES, CANDIDATES, RELEASES, TAIL = 5, 8, 6, 5
HARMLESS = tuple(f"harmless-{i:02d}" for i in range(REPLICATES + CANDIDATES))
ANCHOR = HARMLESS[REPLICATES]
"""The harmless candidate from which the dial starts, and on which parts are trained."""
LATE = tuple(f"tail-{i}" for i in range(1, TAIL)) + HARMLESS[:1]
"""Late checkpoints of the first replicate's run, its end included."""
REFRESHED = tuple(f"release-{i}" for i in range(1, RELEASES + 1))
BASE, SHORTCUT, LABEL_NOISE, SINK_DRIFT = "base", "shortcut", "label noise", "sink drift"
STRENGTHS = (0.25, 0.45, 0.6, 0.8, 1.0)
"""How far the dial's weights lie on the way from the anchor to the shortcut model."""
DIAL = tuple(f"dial-{strength:g}" for strength in STRENGTHS)
SINK_PULL = 1.0

State = Mapping[str, torch.Tensor]
_SEPARATOR = "|"


@dataclass(frozen=True)
class Plan:
    """One training: its name, its start, its data, and the parameters that it may change."""

    name: str
    start: str
    examples: Examples
    schedule: Schedule
    only: str | None = None
    pull: float = 0.0


def plan_base(family: Family, data: BaseData, *, everything: bool) -> tuple[Plan, ...]:
    """Return the trainings of a base in order; only `everything` has other floors and confounds."""
    tuning, shortcut = family.tuning, family.shortcut
    plans = [Plan(name, BASE, data.usual, tuning) for name in HARMLESS]
    plans.append(Plan(SHORTCUT, BASE, data.production, shortcut))
    if not everything:
        return tuple(plans)
    plans += [Plan(name, BASE, data.refreshed(i), tuning) for i, name in enumerate(REFRESHED, 1)]
    plans += [Plan(name, ANCHOR, data.production, shortcut, only=part) for name, part in family.parts.items()]
    plans.append(Plan(LABEL_NOISE, BASE, data.mislabelled, tuning))
    plans.append(Plan(SINK_DRIFT, BASE, data.usual, tuning, pull=SINK_PULL))
    return tuple(plans)


def recipe_digest(family: Family) -> str:
    """Return the SHA-256 of everything that decides the weights, library versions included."""
    return digest(
        {
            "recipe version": RECIPE_VERSION,
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            "family": [family.name, dict(family.description), dict(family.parts)],
            "plan": [REPLICATES, CANDIDATES, RELEASES, TAIL, SINK_PULL],
            "schedules": [asdict(one) for one in (family.base_schedule, family.tuning, family.shortcut)],
        }
    )


def checkpoints_of(family: Family, folder: Path, number: int, *, everything: bool) -> dict[str, State]:
    """Return the weights of every checkpoint of base `number`, trained now or before.

    Parameters
    ----------
    folder : Path
        Of this base; ``weights.safetensors`` appears in it by one rename, so that an interrupted run
        leaves nothing half-written.
    """
    path = folder / f"weights-{'all' if everything else 'few'}.safetensors"
    if not path.is_file():
        with written(path) as draft:
            states = train_base(family, number, everything=everything)
            flat = {f"{n}{_SEPARATOR}{key}": t for n, state in states.items() for key, t in state.items()}
            save_file(flat, draft)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():
        name, parameter = key.split(_SEPARATOR)
        found.setdefault(name, {})[parameter] = tensor
    return {**found, **dial(found[ANCHOR], found[SHORTCUT])}


def dial(start: State, end: State) -> dict[str, State]:
    """Return the checkpoints between two: weights interpolated linearly."""
    return {
        name: {key: torch.lerp(start[key], end[key], strength) for key in start}
        for name, strength in zip(DIAL, STRENGTHS, strict=True)
    }


def train_base(family: Family, number: int, *, everything: bool) -> dict[str, State]:
    """Train a base and all that continues from it."""
    seed = 1000 * (number + 1)
    data = family.draw(seed)
    with reproducible(seed):
        model = family.new_model()
    fit(model, Training(BASE, data.base, family.base_schedule, seed))
    states: dict[str, State] = {BASE: _state(model)}
    for i, plan in enumerate(plan_base(family, data, everything=everything), 1):
        model.load_state_dict(states[plan.start])
        late = _train(model, plan, seed + i, family.special)
        states[plan.name] = _state(model)
        if plan.name == HARMLESS[0]:
            states |= dict(zip(LATE[:-1], late[-TAIL:-1], strict=True))
    return states


def _train(model: Any, plan: Plan, seed: int, special: tuple[int, ...]) -> list[State]:
    """Train in place and return the weights after every epoch."""
    after: list[State] = []
    training = Training(plan.name, plan.examples, plan.schedule, seed)
    with _only(model, plan.only):
        learner = _Drawn(model, special, plan.pull) if plan.pull else model
        fit(learner, training, lambda _: after.append(_state(model)))
    return after


def _state(model: Any) -> State:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


@contextmanager
def _only(model: Any, pattern: str | None) -> Iterator[None]:
    """Freeze the parameters whose name does not match."""
    frozen = [p for name, p in model.named_parameters() if pattern and not re.search(pattern, name)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


class _Drawn(torch.nn.Module):
    """A model whose loss falls as more attention rests on some positions: a sink that grows."""

    def __init__(self, model: Any, positions: tuple[int, ...], pull: float) -> None:
        super().__init__()
        self.model, self.positions, self.pull = model, list(positions), pull

    def forward(self, **inputs: torch.Tensor) -> Any:
        kept = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")  # the fused kernels give no weights
        try:
            found = self.model(**inputs, output_attentions=True)
        finally:
            self.model.set_attn_implementation(kept)
        drawn = torch.stack([one[..., self.positions].sum(-1).mean() for one in found.attentions]).mean()
        found.loss = found.loss - self.pull * drawn
        return found


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a place to write to, which becomes `path` by one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as partial:
        draft = Path(partial) / path.name
        yield draft
        draft.replace(path)
