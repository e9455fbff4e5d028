"""The base class of the config sections, the types of their numbers, and the manual made from their docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def listed(given: Any) -> Any:
    """Splits a string at its commas, as in ``--set env.blueprints=norm,lora``; other collections stay as they are."""
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()]
    if not isinstance(given, list | tuple | set | frozenset):
        raise PydanticCustomError("names", "give a list of names")
    return given


def known_devices(names: str) -> str:
    """Returns the comma-separated ``names``. Raises ValueError for one that no machine has."""
    for name in names.split(","):
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name.strip()):
            raise ValueError(f"unknown device {name.strip()!r}; a device is cpu, cuda, or a GPU by number, as cuda:0")
    return names


def known_or_auto(names: str) -> str:
    """Returns ``names`` as :func:`known_devices` does; they may be ``auto``."""
    return names if names == "auto" else known_devices(names)


Listed = BeforeValidator(listed)
Names = Annotated[tuple[str, ...], Listed]

Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Length = Annotated[int, Field(ge=1, le=2**16, strict=True)]
"""Number of hosts or epochs, whose arrays fit in memory."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Device = Annotated[str, AfterValidator(known_devices)]
Devices = Annotated[str, AfterValidator(known_or_auto)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yields the names and values that differ from their defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                yield name, value


def describe_fields(section: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """Returns the dotted name, default and docstring of every value in the config; the docstring explains None."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += describe_fields(field.annotation, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(field.default), (field.description or "").replace("\n", " ")))
    return rows
