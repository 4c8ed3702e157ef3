"""What is compared: checkpoints, their harmless re-trainings, and probe sets."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from audit._method_parameters import check_target
from audit.config.section import Section
from audit.records import ReplicateKind


class CheckpointSection(Section):
    """One checkpoint: a local directory or hub id, a stored run, or the approved baseline."""

    path: str | None = None
    run: str | None = None
    approved: bool = False
    revision: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum([self.path is not None, self.run is not None, self.approved]) != 1:
            raise ValueError('give exactly one of path = "…", run = "run-…" or approved = true')
        return self


class ReplicateSection(Section):
    """Harmless re-trainings: a path or glob of checkpoints, a stored run, or a frozen floor.

    With `command`, `audit replicate` trains the checkpoint of each of `seeds` (a number, or a list) at
    `path`, in which ``{seed}`` stands for the seed.
    """

    path: str | None = None
    run: str | None = None
    floor: str | None = None
    kind: ReplicateKind = "seed"
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    command: str | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] | list[int] = 5

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.command is not None:
            for name, text in (("seed", self.command), ("out", self.command), ("seed", self.path or "")):
                if f"{{{name}}}" not in text:
                    where = "command" if text is self.command else "path"
                    raise ValueError(f"{where} needs {{{name}}} when replicates are trained by a command")
            if self.seeds == [] or (isinstance(self.seeds, list) and len(set(self.seeds)) < len(self.seeds)):
                raise ValueError("seeds must be a number of seeds, or a list of different ones")
        if sum(source is not None for source in (self.path, self.run, self.floor)) != 1:
            raise ValueError('give exactly one of path = "…", run = "run-…" or floor = "floor.json"')
        return self


class ProbesSection(Section):
    """The probe set, and how its inputs are cut, as in production."""

    path: str
    columns: dict[str, str] = {}
    max_length: Annotated[int, Field(gt=0)] | None = None
    truncate: bool = False
    truncation_side: Literal["left", "right"] = "right"
    stride: Annotated[int, Field(gt=0)] | None = None
    target: str | int | list[str] | None = None

    @field_validator("target")
    @classmethod
    def _pair(cls, value: str | int | list[str] | None) -> str | int | list[str] | None:
        check_target(value)
        if isinstance(value, list) and len(value) != 2:
            raise ValueError(
                f"target is {value}; give one class, or two different ones whose logits are subtracted"
            )
        return value


class DomainSection(Section):
    """The second probe set of a domain audit."""

    path: str
    columns: dict[str, str] = {}
