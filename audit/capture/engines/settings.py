"""Parameters of the methods as a capture uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from audit._method_parameters import ATTRIBUTION, SAMPLES, STEPS, TARGETED, check_method, check_values
from audit.errors import ConfigError
from audit.records import Method

ROLLOUT, RAW, PER_HEAD, FLOW = "rollout", "raw_attention", "per_head_rollout", "attention_flow"
GRADIENT = "gradient_rollout"
VALUE_AWARE = frozenset({"norms", "globenc", "alti", "value_zeroing"})
MEASURED = "measured"
__all__ = [
    "ATTRIBUTION",
    "FLOW",
    "GRADIENT",
    "MEASURED",
    "PER_HEAD",
    "RAW",
    "ROLLOUT",
    "VALUE_AWARE",
    "FoldSettings",
]
_FUSION = ("head_fusion", "discard_ratio", "discard_below", "top_k")


@dataclass(frozen=True)
class FoldSettings:
    """Name and parameters of a method, checked; see docs/methods.md."""

    method: str = ROLLOUT
    residual: float | tuple[float, ...] | Literal["measured"] = 0.5
    start_layer: int = 0
    layer: int = -1
    head: int | None = None
    same_head: bool = False
    form: Literal["relevance", "product"] = "relevance"
    steps: int = STEPS
    samples: int | None = None
    seed: int = 0
    max_seconds: float = 300.0
    head_weights: tuple[tuple[float, ...], ...] | None = None
    fusion: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_method(cls, method: Method) -> FoldSettings:
        """Read the parameters of `method`.

        Raises
        ------
        ConfigError
            When the method or a parameter is unknown (the message names the nearest that is not), or a
            parameter is out of range.
        """
        try:
            name = check_method(method.name, method.params)
            check_values(method.params)
        except ValueError as error:
            raise ConfigError(f"[method] {error}") from None
        return cls._checked(name, {key: value for key, value in method.params.items() if value is not None})

    @classmethod
    def _checked(cls, name: str, given: Mapping[str, Any]) -> FoldSettings:
        defaults, form, weights = cls(), given.get("form", "relevance"), given.get("head_weights")
        if given.get("residual") == MEASURED and name != ROLLOUT:
            raise ConfigError(
                f"[method] residual = 'measured' is for rollout, got {name}; give a number in [0, 1]"
            )
        if given.get("head_fusion") == "weighted" and weights is None:
            raise ConfigError(
                "[method] head_fusion = 'weighted' needs head_weights, one row for each layer; fit them with "
                "audit.capture.fit_head_weights on calibration probes of the before checkpoint"
            )
        return cls(
            method=name,
            residual=_residual(given.get("residual", defaults.residual)),
            start_layer=int(given.get("start_layer", 0)),
            layer=int(given.get("layer", -1)),
            head=None if given.get("head") is None else int(given["head"]),
            same_head=bool(given.get("same_head", False)),
            form=form,
            steps=int(given.get("steps", defaults.steps)),
            samples=None if given.get("samples") is None else int(given["samples"]),
            seed=int(given.get("seed", defaults.seed)),
            max_seconds=float(given.get("max_seconds", defaults.max_seconds)),
            head_weights=None if weights is None else tuple(tuple(map(float, row)) for row in weights),
            fusion={key: given[key] for key in _FUSION if key in given},
        )

    @property
    def needs_target(self) -> bool:
        """Return whether the method explains one logit."""
        return self.method in TARGETED

    def samples_of(self) -> int:
        """Return how many samples the method draws for each probe."""
        return SAMPLES[self.method] if self.samples is None else self.samples

    def residual_of(self, layer: int) -> float:
        """Return the weight of the identity at `layer` (counted from 0)."""
        if isinstance(self.residual, str):
            raise ValueError("residual: expected the measured weights of the layer, got none")
        if isinstance(self.residual, float):
            return self.residual
        if layer >= len(self.residual):
            raise ConfigError(
                f"[method] residual has {len(self.residual)} values, but the checkpoint has more "
                "layers; give one for each"
            )
        return self.residual[layer]

    def head_weights_of(self, layer: int) -> tuple[float, ...] | None:
        """Return the weights of the heads of `layer`, None where heads are not weighted."""
        if self.head_weights is None:
            return None
        if layer >= len(self.head_weights):
            raise ConfigError(
                f"[method] head_weights has {len(self.head_weights)} rows, but the checkpoint has "
                "more layers; give one for each"
            )
        return self.head_weights[layer]


def _residual(given: Any) -> float | tuple[float, ...] | Literal["measured"]:
    if given == MEASURED:
        return "measured"
    return tuple(map(float, given)) if isinstance(given, (list, tuple)) else float(given)
