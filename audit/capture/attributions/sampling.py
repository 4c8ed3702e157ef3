"""SHAP and LIME: what is learnt from inputs of which some positions are occluded at random.

Both ask the same game: a set of positions is kept, the others are occluded as in
:mod:`audit.capture.attributions.occlusion`, and the value of the set is the target logit. Special positions
stay and are no players, so they get nothing; nor are positions that look occluded as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from audit.capture.attributions.occlusion import occluded, removable, replacement_token
from audit.capture.attributions.question import CONVERGED, Question, require_captum
from audit.capture.attributions.rounding import ROUNDINGS, above, rounding
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError

KERNEL_WIDTH = 0.25
"""Of LIME's kernel on the cosine distance, as in its authors' code for text (25 on a scale of 100)."""
RIDGE = 1.0
ADDS_UP = 1e-4
"""Largest error of the sum of Shapley values, relative to the sum of their sizes; it is rounding alone."""


@dataclass(frozen=True)
class Game:
    """What is asked of one probe: the value of each set of players that are kept.

    Attributes
    ----------
    probe : str
        Named in messages.
    players : int
    value : function of a Tensor (set, player) of 0 and 1
        Returns the target logit of each set, in float64: (set,).
    at_once : int
        How many sets are asked for in one call.
    dtype : torch.dtype
        In which the model computes.
    """

    probe: str
    players: int
    value: Callable[[Tensor], Tensor]
    at_once: int
    dtype: torch.dtype


def shapley(question: Question, samples: int, seed: int) -> tuple[Tensor, float]:
    r"""Return |Shapley value| of each position of one probe: (position,), and the error of their sum.

    .. math:: \phi_i = \frac{1}{m} \sum_{\pi} f(\pi_{<i} \cup \{i\}) - f(\pi_{<i})

    over m = `samples` random orders of the positions (Castro, Gómez & Tejada, Computers & OR 36, 2009;
    the game of SHAP, Lundberg & Lee, NeurIPS 2017), by Captum's ``ShapleyValueSampling``. Every order
    adds up to f(all) − f(none), so the mean does; for a game that is a sum of single positions one order
    is exact. `samples` × positions + 2 forward passes.

    Can tell how the difference to the wholly occluded input divides over positions when they interact.
    Cannot tell what the logit does on inputs that people write: nearly all sets are such as no one would.

    Raises
    ------
    CaptureError
        When the values do not add up: the model does not repeat itself, or its rounding hides the difference.
    """
    places, game = _game(question)
    found, error = shapley_values(game, samples, seed)
    return _spread(question, places, found.abs()), error


def shapley_values(game: Game, samples: int, seed: int) -> tuple[Tensor, float]:
    """Return the Shapley value of each player (player,), and the error of their sum; see :func:`shapley`."""
    require_captum()
    from captum.attr import ShapleyValueSampling

    if not game.players:
        return torch.zeros(0, dtype=torch.float64), 0.0
    kept = torch.ones(1, game.players, dtype=torch.float64)
    with _seeded(seed):
        found = ShapleyValueSampling(game.value).attribute(
            kept, n_samples=samples, perturbations_per_eval=game.at_once
        )[0]
    ends = game.value(torch.cat([kept, torch.zeros_like(kept)]))
    full, empty = map(float, ends)
    least = rounding(game.dtype, full, empty)
    spoken = above(found, least)
    if not spoken.any() and abs(full - empty) <= least:
        return spoken, 0.0
    return spoken, _sum_error(game, found, ends)


def _sum_error(game: Game, found: Tensor, ends: Tensor) -> float:
    """Return by how much Shapley values miss f(all) − f(none), the two `ends`, as a part of their sizes.

    Beyond the rounding of a sum, each of the n steps of an order may be off by roundings of the logit
    itself, which is large where two large logits differ by little; n such errors grow as √n.
    """
    full, empty = map(float, ends)
    missed = abs(float(found.sum()) - (full - empty))
    sizes = max(float(found.abs().sum()), abs(full - empty), 1e-30)
    exact = float(torch.finfo(torch.float64 if game.dtype is torch.float64 else torch.float32).eps)
    steps = ROUNDINGS * exact * max(abs(full), abs(empty)) * float(np.sqrt(len(found)))
    allowed = min(ADDS_UP + steps / sizes, CONVERGED)
    if missed > allowed * sizes:
        finer = "float64" if game.dtype in (torch.float32, torch.float64) else "float32"
        raise CaptureError(
            f"probe {game.probe}: Shapley values miss their sum by {missed / sizes:.1e} of "
            f"their sizes, allowed {allowed:.1e} (logit {full:.7g}, {empty:.7g} with all content occluded); "
            f"load the checkpoint in {finer}, or remove the probe"
        )
    return missed / sizes


def lime(question: Question, samples: int, seed: int) -> Tensor:
    r"""Return |weight| of each position in a linear model of the target logit: (position,).

    .. math:: \min_w \sum_z e^{-d(z)^2 / 2 \sigma^2} (f(z) - w \cdot z - b)^2 + \lambda |w|^2

    over `samples` random sets z, each position kept with chance ½, d the cosine distance to the whole
    input, σ = 0.25 and λ = 1 (Ribeiro, Singh & Guestrin, KDD 2016), by Captum's ``Lime`` with
    scikit-learn's ridge regression. `samples` + 1 forward passes.

    Can tell which positions a linear model needs to follow the logit around this input. Cannot tell
    interactions, and the noise of its sample is in every weight: another seed gives other weights.
    """
    places, game = _game(question)
    return _spread(question, places, lime_weights(game, samples, seed).abs())


def lime_weights(game: Game, samples: int, seed: int) -> Tensor:
    """Return the weight of each player in the linear model of :func:`lime`: (player,)."""
    require_captum()
    from captum._utils.models.linear_model import SkLearnRidge
    from captum.attr import Lime
    from captum.attr._core.lime import get_exp_kernel_similarity_function

    if not game.players:
        return torch.zeros(0, dtype=torch.float64)
    near = get_exp_kernel_similarity_function("cosine", kernel_width=KERNEL_WIDTH)
    method = Lime(game.value, interpretable_model=SkLearnRidge(alpha=RIDGE), similarity_func=near)
    kept = torch.ones(1, game.players, dtype=torch.float64)
    with _seeded(seed):
        found: Tensor = method.attribute(
            kept,
            n_samples=samples,
            perturbations_per_eval=game.at_once,
        )[0]
    return above(found, rounding(game.dtype, float(game.value(kept)[0])))


def _game(question: Question) -> tuple[np.ndarray, Game]:
    """Return the positions that play, and their game."""
    (item,) = question.batch
    _, token = replacement_token(question.checkpoint, [item])
    places = removable(item, token)
    size = question.rows_at_once(len(item))

    def value(kept: Tensor) -> Tensor:
        masks = np.zeros((len(kept), len(item)))
        masks[:, places] = 1 - kept.detach().cpu().numpy()
        variants = [occluded(item, mask, token) for mask in masks]
        with torch.no_grad():
            parts = [question.scores(variants[i : i + size]) for i in range(0, len(variants), size)]
        return torch.cat(parts).cpu()

    return places, Game(item.probe.id, len(places), value, size, core_model(question.checkpoint.model).dtype)


def _spread(question: Question, places: np.ndarray, values: Tensor) -> Tensor:
    found = question.read.new_zeros(len(question.batch[0]), dtype=torch.float64)
    found[torch.from_numpy(places).to(found.device)] = values.to(found)
    return found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Fix the random state of the CPU, which Captum draws from, and put it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
