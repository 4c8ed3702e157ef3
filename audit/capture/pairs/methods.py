"""Which methods run on models of several stacks, and in one line why the others do not."""

from __future__ import annotations

from audit._method_parameters import PARAMETERS
from audit.capture.attention.layers import CapturePlan
from audit.capture.engines.settings import (
    GRADIENT,
    MEASURED,
    ROLLOUT,
    FoldSettings,
)
from audit.errors import ConfigError

WIRINGS: dict[str, str] = {
    "single": "one stack",
    "encoder-decoder": "an encoder-decoder",
    "towers": "two towers",
    "co-attention": "two streams that attend to each other",
    "joined": "an image with text, or in windows",
}
"""What each wiring is called in a message."""

REFUSED: dict[str, dict[str, str]] = {
    "single": {},
    "towers": {},
    "encoder-decoder": {},
    "co-attention": {
        "value_zeroing": "a layer where streams cross attends twice, one after the other, so that the values "
        "of the second hold what crossed in the first; use norms or alti",
    },
    "joined": {},
}
"""Methods that have no exact meaning on a wiring, with the reason."""


def methods_of(wiring: str) -> tuple[str, ...]:
    """Return the methods that run on a wiring, in the order of the documentation.

    Examples
    --------
    >>> "value_zeroing" in methods_of("single"), "value_zeroing" in methods_of("co-attention")
    (True, False)
    """
    return tuple(name for name in PARAMETERS if name not in REFUSED[wiring])


def check_pair_settings(settings: FoldSettings, wiring: str) -> None:
    """Refuse methods and parameters that have no exact meaning for several stacks.

    Raises
    ------
    ConfigError
        Naming the method or the parameter, and why.
    """
    if (why := REFUSED[wiring].get(settings.method)) is not None:
        raise ConfigError(
            f"[method] name = {settings.method!r} is not available for {WIRINGS[wiring]}: {why}"
        )
    by_stack = wiring in ("towers", "joined")
    parameter = _unmeasured(settings) if by_stack else _meaningless(settings)
    if parameter is not None:
        raise ConfigError(f"[method] {parameter[0]} is not available for {WIRINGS[wiring]}: {parameter[1]}")


def check_joined_settings(settings: FoldSettings, plan: CapturePlan) -> None:
    """Refuse what has no exact meaning for the stacks through which an image comes to a text.

    Raises
    ------
    ConfigError
        Naming the method or the parameter, and why.
    """
    crossed = any(layer.kind == "cross" for layer in plan.layers)
    asked = f"name = {settings.method!r}"
    if crossed and settings.form == "product":
        raise ConfigError(
            "[method] form is not available for blocks that attend to an image: the product form is defined "
            "for one stack of self-attention; use 'relevance'"
        )
    if crossed and settings.method in ("globenc", "value_zeroing"):
        raise ConfigError(
            f"[method] {asked} is not available for blocks that attend to an image: it "
            "takes the layers of an encoder and of a decoder alone; use norms or alti"
        )
    last = {layer.path for layer in plan.layers if layer.stack == plan.stacks[-1]}
    if plan.pieces & last and settings.method == GRADIENT:
        _refuse(asked, "a last stack that attends in pieces", "its row is carried down by whole layers")
    if len(plan.stacks) > 1:
        for name, given in (
            ("head_weights", settings.head_weights is not None),
            ("residual", isinstance(settings.residual, tuple)),
            ("same_head", settings.same_head),
        ):
            if given:
                _refuse(name, "an image that comes through a tower", "it does not say of which stack")


def _refuse(what: str, where: str, why: str) -> None:
    raise ConfigError(f"[method] {what} is not available for {where}: {why}; use rollout with one residual")


def _unmeasured(settings: FoldSettings) -> tuple[str, str] | None:
    if settings.residual == MEASURED and settings.method != ROLLOUT:
        return "residual", "'measured' is there for rollout alone; give a number"
    return None


def _meaningless(settings: FoldSettings) -> tuple[str, str] | None:
    """Return a parameter that says nothing about stacks of several kinds of attention, and why."""
    if settings.start_layer != 0:
        return "start_layer", "it does not say in which stack; leave it out"
    if settings.head_weights is not None:
        return (
            "head_weights",
            "its rows name the heads of one stack; use head_fusion = 'mean', 'max' or 'min'",
        )
    if settings.same_head:
        return "same_head", "heads of self- and cross-attention do not correspond; leave it out"
    if isinstance(settings.residual, tuple):
        return "residual", "one number per layer does not say of which stack; give a single number"
    if settings.form == "product":
        return "form", "the product form is defined for one stack of self-attention; use 'relevance'"
    return _unmeasured(settings)
