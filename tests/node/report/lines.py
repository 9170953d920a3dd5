"""Lines of event logs, of which tests name the fields that matter to them."""

import dataclasses
from typing import Any

from planaria.node.report.events import Entry, Event, parse

ZEROS = {"str": "", "Figure": 0.0, "Count": 0, "bool": False, "tuple": [], "Mapping": {}}


def entry(line: dict[str, Any]) -> Entry:
    """Of the line, whose other fields are zero or empty."""
    kind = next(kind for kind in Event.__subclasses__() if kind.kind == line["kind"])
    missing = [one for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING]
    zeros = {
        one.metadata.get("key", one.name): ZEROS.get(str(one.type).partition("[")[0])
        for one in missing
    }
    found = parse({**zeros, **line})
    assert found is not None
    return found
