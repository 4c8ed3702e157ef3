"""The methods that a capture can be asked for, and the parameters that each takes.

One list for the configuration file, the command line and the API, so that all name the same things.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

_FUSION = ("head_fusion", "head_weights", "discard_ratio", "discard_below", "top_k")

PARAMETERS: dict[str, tuple[str, ...]] = {
    "rollout": (*_FUSION, "residual", "start_layer"),
    "raw_attention": (*_FUSION, "layer"),
    "per_head_rollout": ("residual", "layer", "head", "same_head"),
    "gradient_rollout": ("form",),
    "attention_flow": (*_FUSION, "residual", "max_seconds"),
    "norms": (),
    "globenc": (),
    "alti": (),
    "value_zeroing": (),
    "input_x_gradient": (),
    "integrated_gradients": ("steps",),
    "occlusion": (),
    "shap": ("samples", "seed"),
    "lime": ("samples", "seed"),
    "grad_cam": ("layer",),
    "lrp": (),
}
"""Parameters of each method."""

ALIASES = {"raw": "raw_attention"}
"""Short names."""

ATTRIBUTION = frozenset(
    {"input_x_gradient", "integrated_gradients", "occlusion", "shap", "lime", "grad_cam", "lrp"}
)
"""Methods that explain the target logit beside attention."""

TARGETED = ATTRIBUTION | {"gradient_rollout"}
"""Methods that explain one logit, and so need a task head."""

LEAST = {"top_k": 1, "start_layer": 0, "head": 0, "steps": 2, "samples": 2, "seed": 0}
"""Smallest value of each parameter that is a whole number."""

STEPS = 32
"""Steps of integrated gradients, where none are asked for."""

SAMPLES: Mapping[str, int] = {"shap": 25, "lime": 500}
"""Orders of the positions for SHAP, perturbed inputs for LIME, where none are asked for."""

CHOICES = {"head_fusion": ("mean", "max", "min", "weighted"), "form": ("relevance", "product")}
"""Values of each parameter that is a name."""


def check_method(name: str, params: Iterable[str]) -> str:
    """Return the full name of a method, or raise ValueError for what it does not know.

    Parameters
    ----------
    name : str
    params : names of the parameters that were given

    Raises
    ------
    ValueError
        Naming the nearest valid method or parameter.

    Examples
    --------
    >>> check_method("raw", ["layer"])
    'raw_attention'
    >>> check_method("attention_flaw", [])
    Traceback (most recent call last):
    ValueError: method 'attention_flaw' is unknown; did you mean 'attention_flow'?
    """
    full = ALIASES.get(name, name)
    if full not in PARAMETERS:
        raise ValueError(f"method {name!r} is unknown; {_nearest(name, PARAMETERS)}")
    for key in params:
        if key not in PARAMETERS[full]:
            known = PARAMETERS[full]
            hint = _nearest(key, known) if known else f"{full} takes no parameters, remove it"
            raise ValueError(f"parameter {key!r} is unknown to {name!r}; {hint}")
    return full


def check_residual(residual: object, start_layer: int = 0) -> None:
    """Raise ValueError where the residual is 1 on every layer that counts, so that no attention is read.

    Examples
    --------
    >>> check_residual([1.0, 0.5])
    >>> check_residual(1.0)
    Traceback (most recent call last):
    ValueError: residual = 1.0 reads nothing: maps would be the output position itself; give less than 1
    """
    layers = residual[start_layer:] if isinstance(residual, list | tuple) else [residual]
    if layers and all(isinstance(one, int | float) and one == 1 for one in layers):
        raise ValueError(
            f"residual = {residual!r} reads nothing: maps would be the output position itself; "
            "give less than 1"
        )


def check_values(params: Mapping[str, Any]) -> None:
    """Raise ValueError for the first parameter whose value is of the wrong kind or out of range.

    Parameters that are None count as not given. The residual is a share, one for each layer, or
    ``measured``; it may not be 1 throughout, see :func:`check_residual`.

    Examples
    --------
    >>> check_values({"residual": [0.5, 0.4], "top_k": 3, "head_fusion": "max"})
    >>> check_values({"start_layer": -1})
    Traceback (most recent call last):
    ValueError: start_layer is -1; expected a whole number from 0
    """
    given = {key: value for key, value in params.items() if value is not None}
    for key, value in given.items():
        if (key in LEAST or key == "layer") and not _is_whole(value, LEAST.get(key)):
            least = f" from {LEAST[key]}" if key in LEAST else ""
            raise ValueError(f"{key} is {value!r}; expected a whole number{least}")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"{key} = {value!r} is unknown; use {' or '.join(map(repr, CHOICES[key]))}")
        if key == "same_head" and not isinstance(value, bool):
            raise ValueError(f"same_head is {value!r}; expected true or false")
    if "head_weights" in given and given.get("head_fusion") != "weighted":
        raise ValueError("head_weights go with head_fusion = 'weighted' alone; set it, or leave them out")
    _check_shares(given)
    seconds = given.get("max_seconds", 1)
    if not _is_number(seconds) or seconds <= 0:
        raise ValueError(f"max_seconds is {seconds!r}; expected a number of seconds above 0")
    check_residual(given.get("residual"), given.get("start_layer", 0))


def _check_shares(given: Mapping[str, Any]) -> None:
    ratio, below, residual = (given.get(key, 0.0) for key in ("discard_ratio", "discard_below", "residual"))
    if not _is_number(ratio) or not 0 <= ratio < 1:
        raise ValueError(f"discard_ratio is {ratio!r}; expected a share from 0 to less than 1")
    if not _is_number(below) or not 0 <= below <= 1:
        raise ValueError(f"discard_below is {below!r}; expected a share from 0 to 1")
    for one in residual if isinstance(residual, list | tuple) else [residual]:
        if isinstance(residual, str) and residual == "measured":
            continue
        if not _is_number(one) or not 0 <= one <= 1:
            raise ValueError(f"residual is {one!r}; expected a share from 0 to 1, such as 0.5, or 'measured'")


def check_target(target: Any) -> None:
    """Raise ValueError for a target that is no class: neither a name nor an index, nor two different ones.

    Lists are either two names, whose logits are subtracted, or one target for each probe; mappings give the
    targets of the probes by their ids.

    Examples
    --------
    >>> check_target("positive"), check_target(["yes", "no"]), check_target([1, None, ("yes", "no")])
    (None, None, None)
    >>> check_target(["yes", "yes"])
    Traceback (most recent call last):
    ValueError: target is ['yes', 'yes']; give one class, or two different ones whose logits are subtracted
    """
    if isinstance(target, Mapping):
        each: Iterable[Any] = target.values()
    elif hasattr(target, "__len__") and not isinstance(target, str):
        pair = (
            isinstance(target, list | tuple)
            and len(target) == 2
            and all(isinstance(one, str) for one in target)
        )
        if pair and target[0] == target[1]:
            raise ValueError(
                f"target is {target!r}; give one class, or two different ones whose logits are subtracted"
            )
        each = target
    elif target is None or isinstance(target, str | int | float):
        each = [target]
    else:
        raise ValueError(f"target is {target!r}; give the name of a class, or its index from 0")
    for one in each:
        if isinstance(one, list | tuple):
            check_target(one)
        else:
            _check_class(one)


def _check_class(target: Any) -> None:
    if isinstance(target, bool | float) or (isinstance(target, int) and target < 0):
        raise ValueError(f"target is {target!r}; give the name of a class, or its index from 0")


def _is_whole(value: Any, least: int | None) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)


def _nearest(given: str, known: Iterable[str]) -> str:
    choices = list(known)
    near = difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(choices)}"
