"""Lines of event logs for tests, which name only the fields that matter to them."""

import dataclasses
from typing import Any

from planaria.node.report.events import Entry, Event, parse

ZEROS = {"str": "", "Figure": 0.0, "Count": 0, "bool": False, "tuple": [], "Mapping": {}}
ZEROS["Annotated"] = 0  # a field with another name in JSON


def whole(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line with its missing fields as zero or empty."""
    kinds = {kind.kind: kind for kind in Event.__subclasses__()}
    fields = dataclasses.fields(kinds[line["kind"]]) if line["kind"] in kinds else ()
    zeros = {
        field.metadata.get("key", field.name): ZEROS.get(str(field.type).partition("[")[0])
        for field in fields
        if field.default is dataclasses.MISSING
    }
    return {**zeros, **line}


def entry(line: dict[str, Any]) -> Entry:
    parsed = parse(whole(line))
    assert parsed is not None
    return parsed
