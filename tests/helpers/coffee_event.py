"""Defines an event as another package would."""

from dataclasses import dataclass

from megatron_ft.records import Note, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class CoffeeFinished(Record):
    """The coffee machine of the data centre is empty."""

    cups: int
    """Cups since it was filled."""

    def describe(self) -> Note:
        return Note("warning", f"no coffee after {self.cups} cups")
