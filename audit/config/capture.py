"""How maps are made: the method, and how the forward passes are run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from audit._method_parameters import check_method, check_values
from audit.config.section import Section
from audit.records import CaptureSettings, Method


class MethodSection(Section):
    """How attention becomes a map."""

    name: str = Method.name
    row: str = Method.row
    head_fusion: str | None = None
    residual: float | list[float] | Literal["measured"] | None = None
    discard_ratio: float | None = None
    discard_below: float | None = None
    top_k: int | None = None
    start_layer: int | None = None
    layer: int | None = None
    form: str | None = None
    head: int | None = None
    same_head: bool | None = None
    head_weights: list[list[float]] | None = None
    steps: int | None = None
    samples: int | None = None
    seed: int | None = None
    max_seconds: float | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_method(self.name, self._given())
        check_values(self._given())
        return self

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
