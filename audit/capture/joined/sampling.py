"""SHAP and LIME of an image with text: patches and tokens are players of one game.

A player that is not kept is removed as in the occlusion of :mod:`audit.capture.joined.attribution`: a token
becomes the replacement token, a patch the mean colour of its image. The value of a set is the one logit that
is explained, so that patches and tokens are on one scale. See :mod:`audit.capture.attributions.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attributions.sampling import Game, lime_weights, shapley_values
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.question import JoinedQuestion, Parts
from audit.capture.outputs.scores import Score


def sampled_parts(
    asked: JoinedQuestion, targets: Mapping[str, Score], settings: FoldSettings
) -> tuple[Parts, dict[str, float]]:
    """Return |Shapley value| or |weight in a linear model| of each token and patch, and diagnostics.

    Parameters
    ----------
    asked : JoinedQuestion
    targets : mapping of probe id to Score
    settings : FoldSettings
        ``shap`` or ``lime``, their samples and their seed.

    Returns
    -------
    (token,) and (image position,) arrays, 0 where nothing may be removed; ``completeness_error`` for SHAP

    Raises
    ------
    CaptureError
        When Shapley values do not add up, or patches cannot be removed.
    """
    grey, token = asked.grey(), asked.replacement()
    players, samples = players_of(asked, grey, token), settings.samples_of()
    game = _game(asked, targets, players, (grey, token))
    extra = {}
    if settings.method == "shap":
        found, extra["completeness_error"] = shapley_values(game, samples, settings.seed)
    else:
        found = lime_weights(game, samples, settings.seed)
    sizes = found.abs().double().numpy()
    tokens, patches = np.zeros(len(asked.front.words)), np.zeros(len(asked.removable))
    tokens[players[0]], patches[players[1]] = np.split(sizes, [len(players[0])])
    return (tokens, patches), extra


def players_of(
    asked: JoinedQuestion, grey: Tensor, token: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens and the patches that removal changes: not those that look removed as they are."""
    tokens, given = asked.tokens, asked.item.tensors
    bare = asked.without(tokens, asked.removable, grey, token)
    changed = (bare[asked.argument] != given[asked.argument]).cpu().numpy()
    fed = np.broadcast_to(asked.front.pixels, changed.shape)
    moved = np.bincount(fed[changed & (fed >= 0)], minlength=len(asked.removable)) > 0
    if len(tokens):
        tokens = tokens[given["input_ids"][0].cpu().numpy()[tokens] != token]
    return tokens, np.flatnonzero(moved & asked.removable)


def _game(
    asked: JoinedQuestion,
    targets: Mapping[str, Score],
    players: tuple[NDArray[np.int64], NDArray[np.int64]],
    removed: tuple[Tensor, int | None],
) -> Game:
    """Return the game of tokens, followed by patches; `removed` is what takes their places."""
    (tokens, places), (grey, token) = players, removed

    def value(kept: Tensor) -> Tensor:
        found = []
        for gone in kept.cpu().numpy() < 0.5:
            patches = np.zeros_like(asked.removable)
            patches[places] = gone[len(tokens) :]
            changed = asked.without(tokens[gone[: len(tokens)]], patches, grey, token)
            found.append(asked.value(changed, targets))
        return torch.tensor(found, dtype=torch.float64)

    return Game(
        asked.item.probe.id, len(tokens) + len(places), value, 1, core_model(asked.checkpoint.model).dtype
    )
