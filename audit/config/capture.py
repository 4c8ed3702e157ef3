"""How maps are made: the method, and how the forward passes are run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from audit._method_parameters import check_method, check_residual
from audit.config.section import Section
from audit.records import CaptureSettings, Method


class MethodSection(Section):
    """How attention becomes a map."""

    name: str = Method.name
    row: str = Method.row
    head_fusion: Literal["mean", "max", "min", "weighted"] | None = None
    residual: float | list[float] | Literal["measured"] | None = None
    discard_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    discard_below: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    start_layer: Annotated[int, Field(ge=0)] | None = None
    layer: int | None = None
    form: Literal["relevance", "product"] | None = None
    head: Annotated[int, Field(ge=0)] | None = None
    same_head: bool | None = None
    head_weights: list[list[float]] | None = None
    steps: Annotated[int, Field(ge=2)] | None = None
    samples: Annotated[int, Field(ge=2)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    max_seconds: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_method(self.name, self._given())
        check_residual(self.residual, self.start_layer or 0)
        return self

    @field_validator("residual")
    @classmethod
    def _shares(cls, value: float | list[float] | str | None) -> float | list[float] | str | None:
        given = value if isinstance(value, list) else [value]
        wrong = [one for one in given if isinstance(one, float) and not 0 <= one <= 1]
        if wrong:
            raise ValueError(f"residual is {wrong[0]:g}; expected a share from 0 to 1, such as 0.5")
        return value

    def _given(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name", "row"}, exclude_none=True)

    def record(self) -> Method:
        """Return the method with only the parameters that were given."""
        return Method(name=check_method(self.name, ()), row=self.row, params=self._given())


class CaptureSection(Section):
    """How the forward passes are run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float64"] | None = None
    attention_implementation: str | None = None
    batch_tokens: Annotated[int, Field(gt=0)] = CaptureSettings.batch_tokens
    shard_probes: Annotated[int, Field(gt=0)] = CaptureSettings.shard_probes
    layer_maps: bool = CaptureSettings.layer_maps
    together: bool = False
