"""docs/formats.md has the keys that the code writes."""

import dataclasses
import re
from pathlib import Path

import pytest

from planaria.bootstrap import registry_pb2
from planaria.node.report.events import Event
from planaria.node.report.ledger import LedgerHeader, Line

PAGE = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
EVENTS = dict(re.findall(r"^\| ([a-z ]+) \| (.*?) \| .*\|$", PAGE.partition("## Ledgers")[0], re.M))
STATUS = re.findall(r"^\| .* \| (\w+) \| (`.*`) \|$", PAGE.partition("status --json")[2], re.M)


def keys(kind: type[Event]) -> str:
    names = (
        f"`{field.metadata.get('key', field.name)}`" + "?" * (field.default is None)
        for field in dataclasses.fields(kind)
    )
    return ", ".join(names) or "none"


def test_each_kind_of_event_has_its_keys() -> None:
    assert {kind.kind: keys(kind) for kind in Event.__subclasses__()} == {
        kind: listed for kind, listed in EVENTS.items() if kind != "kind"
    }


def test_the_ledgers_keys() -> None:
    for line in (LedgerHeader, Line):
        listed = ", ".join(f"`{key}`" for key in line.__annotations__)
        assert listed in " ".join(PAGE.split())


@pytest.mark.parametrize(("message", "listed"), STATUS)
def test_a_message_of_the_status_has_its_keys(message: str, listed: str) -> None:
    fields = getattr(registry_pb2, message).DESCRIPTOR.fields
    assert listed == ", ".join(f"`{field.name}`" for field in fields)
