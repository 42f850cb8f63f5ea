"""The reference of the wire contract is rendered from the types that make the bytes."""

from __future__ import annotations

from enum import StrEnum

import pytest

from schemas.message import Message, Part
from schemas.outcome import Completed
from schemas.topics import TABLE
from schemas.wire_page import attribute_docstrings, enum_section, struct_section, wire_page
from tests.strategies import MESSAGE_TYPES


class Colour(StrEnum):
    """What something looks like."""

    RED = "red"
    """As blood | as roses."""


class Wheel(Part, frozen=True, kw_only=True):
    """Something round."""

    spokes: tuple[int, ...] = (1, 2)
    """How many,
    by ring."""


class Cart(Message, frozen=True, kw_only=True, tag="test.cart"):
    """Something that rolls.

    And more that the page leaves out.
    """

    name: str
    """What it is called."""
    colour: Colour = Colour.RED
    """How it looks."""
    wheels: dict[str, Wheel] = {}  # noqa: RUF012 - msgspec copies an empty default
    """Its wheels by name."""
    spare: Wheel | None = None
    """One more."""
    first: Wheel = Wheel()
    """The best."""
    broken: bool = False
    """It does not roll."""
    limit: float = 1.5
    """Most weight."""

    @property
    def described(self) -> str:
        """Return a property, which is not on the wire."""
        return self.name


def test_a_message_is_rendered_with_its_envelope_types_and_sentences():
    """Types are msgpack's, defaults are shown, and the sentence is the string under the field."""
    assert struct_section(Cart) == (
        "#### test.cart\n"
        "\n"
        "Something that rolls.\n"
        "\n"
        "| field | type | default | meaning |\n"
        "|---|---|---|---|\n"
        "| `v` | int | required | Major version: 1. |\n"
        '| `type` | text | required | Always `"test.cart"`. |\n'
        "| `name` | text | required | What it is called. |\n"
        '| `colour` | [Colour](#colour) | `"red"` | How it looks. |\n'
        "| `wheels` | map of text to [Wheel](#wheel) | `{}` | Its wheels by name. |\n"
        "| `spare` | [Wheel](#wheel) or nil | nil | One more. |\n"
        "| `first` | [Wheel](#wheel) | its defaults | The best. |\n"
        "| `broken` | bool | `false` | It does not roll. |\n"
        "| `limit` | float | `1.5` | Most weight. |\n"
    )


def test_a_value_inside_a_message_has_no_envelope():
    """Only messages carry a version."""
    assert "| `spokes` | array of int | `[1, 2]` | How many, by ring. |" in struct_section(Wheel)
    assert "| `v` |" not in struct_section(Wheel)


def test_a_kind_of_outcome_shows_what_tells_it_apart():
    """The tag of a value is a field like any other on the wire."""
    assert '| `outcome` | text | required | Always `"completed"`. |' in struct_section(Completed)


def test_an_enumeration_is_rendered_with_its_members():
    """A bar in a sentence does not break the table."""
    assert enum_section(Colour) == (
        "#### Colour\n\nWhat something looks like.\n\n"
        "| value | meaning |\n|---|---|\n| `red` | As blood \\| as roses. |\n"
    )


def test_a_field_without_a_sentence_is_an_error():
    """Every field has one, so this also keeps the messages documented."""

    class Bare(Part, frozen=True, kw_only=True):
        """Says nothing about its field."""

        field: int

    with pytest.raises(TypeError, match=r"Bare\.field has no sentence"):
        attribute_docstrings(Bare)


def test_every_topic_and_message_is_on_the_page():
    """What may lie in the log can be looked up."""
    page = wire_page()
    for topic in TABLE:
        assert f"| `{topic.name}` |" in page
    for kind in MESSAGE_TYPES:
        assert page.count(f"#### {kind.wire_type()}\n") == 1


def test_every_link_leads_to_a_heading():
    """A type named in a table is described on the page."""
    page = wire_page()
    headings = {line[5:].lower().replace(".", "") for line in page.splitlines() if line.startswith("#### ")}
    links = {link.split(")")[0] for link in page.split("](#")[1:]}
    assert links
    assert links <= headings
