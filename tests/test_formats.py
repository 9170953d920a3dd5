"""docs/formats.md lists the keys that the code writes."""

import dataclasses
import inspect
import re
from inspect import get_annotations
from pathlib import Path

from planaria.bootstrap import registry_pb2
from planaria.node.report import notifications
from planaria.node.report.events import Event
from planaria.node.report.ledger import LedgerHeader, Line
from planaria.node.report.notifications import Notification

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
        listed = ", ".join(
            f"`{key}`" + "?" * ("NotRequired[" in str(kind))
            for key, kind in get_annotations(line).items()
        )
        assert listed in " ".join(PAGE.split())


def test_the_keys_and_kinds_of_a_notification() -> None:
    section = PAGE.partition("## Notifications")[2]
    assert ", ".join(f"`{key}`" for key in Notification._fields) in section
    kinds = re.findall(r'Condition\("(\w+)"', inspect.getsource(notifications))
    assert re.findall(r"^- `(\w+)`", section, re.M) == list(dict.fromkeys(kinds))


def test_each_message_of_the_status_has_its_keys() -> None:
    messages: dict[str, str] = {}
    pending = [registry_pb2.Description.DESCRIPTOR]
    while pending:
        message = pending.pop()
        if message.name not in messages:
            messages[message.name] = ", ".join(f"`{field.name}`" for field in message.fields)
            pending += [field.message_type for field in message.fields if field.message_type]
    assert messages == dict(STATUS)
