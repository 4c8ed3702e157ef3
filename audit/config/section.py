"""What the sections of an audit.toml have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the file: an unknown key or an infinite number is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
