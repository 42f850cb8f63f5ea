"""What the parts of a configuration are made of: bounded numbers, and a frozen model that takes no unknown key."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from infra.settings import plain_texts

MOST = 2**31 - 1
"""Largest number of anything that is counted."""

INT64 = 2**63 - 1
"""Largest number that a record holds."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """A part of the configuration: no unknown keys, no changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        return plain_texts(values)
