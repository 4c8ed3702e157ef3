"""The methods that a capture can be asked for, and the parameters that each takes.

One list for the configuration file, the command line and the API, so that all name the same things.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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

CALIBRATED = "weighted"
"""Head fusion that needs weights, fitted beforehand on calibration probes."""


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


def _nearest(given: str, known: Iterable[str]) -> str:
    choices = list(known)
    near = difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(choices)}"
