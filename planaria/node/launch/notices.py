"""Notices of clouds that a spot instance will end, from the metadata service at 169.254.169.254.

- AWS, with a token (IMDSv2): `spot/instance-action` exists two minutes before the end, and has
  its time; hibernation has no notice.
  docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.
- GCP: `instance/preempted` is TRUE for up to 30 seconds, or 120 where the machine was made so; it
  doesn't say. cloud.google.com/compute/docs/instances/create-use-spot.
- Azure: `scheduledevents` has an event of type Preempt at least 30 seconds before the end.
  learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.

Each `Cloud` knows its requests and answers; `ask_metadata` sends one, `watch_notices` polls beside
an event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, Protocol

log = logging.getLogger("planaria")

ADDRESS: Final = "169.254.169.254:80"
ADDRESS_VARIABLE: Final = "PLANARIA_METADATA_ADDRESS"
"""Environment variable with another address, for tests."""
POLL = 2.0
"""Seconds between two checks for a notice; AWS recommends five or less, GCP leaves only thirty."""
MARGIN = 3.0
"""Seconds before the announced end at which a node wants to be gone; the time is approximate."""
FAREWELL = 2.0
"""Seconds of its grace that a node keeps for leaving properly."""
PATIENCE = 2.0
"""Seconds for a metadata service to answer."""
FIRST_EVENTS = 130.0
"""Seconds for Azure's first answer about events, which may take two minutes."""
SOON = 120.0
"""Seconds before its end at which a machine begins to leave: some notices are days ahead."""
STALE = 300.0
"""Seconds after the announced end at which a notice is obsolete."""
LEAST = 5.0
"""Minimum seconds to leave, whatever the notice says."""
MOST_BYTES = 1 << 20
TOKEN_SECONDS = 21600  # six hours, the longest that AWS gives

ENDING = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Azure's events that end all processes. A `Freeze` doesn't."""


class Notice(NamedTuple):
    """A cloud's notice of this machine's end."""

    event: str  # cloud and event, in words
    left: float | None  # seconds; None: unknown

    def grace(self, default: float) -> float:
        """Seconds in which to leave; `default` if the notice has no time."""
        return default if self.left is None else max(LEAST, self.left - MARGIN)


class MetadataAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: str


class Ask(Protocol):
    """Request to the metadata service. Raises OSError after `timeout` seconds."""

    def __call__(
        self, method: str, path: str, headers: Mapping[str, str], timeout: float = PATIENCE
    ) -> MetadataAnswer: ...


class Cloud(Protocol):
    name: str

    def is_here(self) -> bool:
        """Whether this machine is in this cloud. Raises OSError without an answer."""

    def find_notice(self, now: float) -> Notice | None:
        """The present notice; `now` in Unix seconds. Raises OSError; ValueError if invalid."""


class Aws:
    name = "AWS"

    def __init__(self, ask: Ask) -> None:
        self._ask, self._token = ask, ""

    def is_here(self) -> bool:
        return self._renewed()

    def find_notice(self, now: float) -> Notice | None:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            return None
        fields = _fields(answer)
        action, at = _text(fields, "action"), _text(fields, "time")
        left = _unix_seconds(at) - now
        return Notice(f"AWS: {action} at {at}", left) if left > -STALE else None

    def public_ipv4(self) -> str:
        """This machine's public address; empty: it has none. Raises as `find_notice` does. See
        docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html."""
        answer = self._get("/latest/meta-data/public-ipv4")
        return "" if answer is None else str(ipaddress.IPv4Address(answer.strip()))

    def _renewed(self) -> bool:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        answer = self._ask("PUT", "/latest/api/token", headers)
        self._token = _word_in(answer)
        return bool(self._token)

    def _get(self, path: str) -> str | None:
        """The value of an item of AWS's metadata; None: it doesn't exist."""
        answer = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401 and self._renewed():  # after six hours
            answer = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
        return None if answer.status == 404 else _body(answer, path)


class Gcp:
    name = "GCP"
    headers: Final = {"Metadata-Flavor": "Google"}
    path: Final = "/computeMetadata/v1/instance/preempted"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def is_here(self) -> bool:
        answer = self._ask("GET", self.path, self.headers)
        return answer.status == 200 and answer.headers.get("metadata-flavor") == "Google"

    def find_notice(self, now: float) -> Notice | None:
        body = _body(self._ask("GET", self.path, self.headers), self.path).strip()
        if body not in ("TRUE", "FALSE"):
            raise ValueError(f"{self.path} is neither TRUE nor FALSE, but {body[:40]!r}")
        return Notice("GCP: preempted", None) if body == "TRUE" else None


class Azure:
    name = "Azure"
    headers: Final = {"Metadata": "true"}
    own_name: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    events: Final = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self, ask: Ask) -> None:
        self._ask, self._name, self._patience = ask, "", FIRST_EVENTS

    def is_here(self) -> bool:
        answer = self._ask("GET", self.own_name, self.headers)
        self._name = _word_in(answer)
        return bool(self._name)

    def find_notice(self, now: float) -> Notice | None:
        """This machine's next event: machines of a set get each other's, too."""
        if not self._name:
            self.is_here()
        answer = self._ask("GET", self.events, self.headers, self._patience)
        self._patience = PATIENCE
        notices = [
            _azure_event(event, now)
            for event in _fields(_body(answer, self.events)).get("Events", [])
            if self._name in event["Resources"] and event["EventType"] in ENDING
        ]
        return min(notices, key=lambda notice: notice.left or 0.0, default=None)


CLOUDS: Final[Mapping[str, Callable[[Ask], Cloud]]] = {"gcp": Gcp, "azure": Azure, "aws": Aws}
"""Clouds in the order of detection."""


def _azure_event(event: Mapping[str, Any], now: float) -> Notice:
    """Notice of Azure's event; one that has begun leaves no time."""
    at = _text(event, "NotBefore")
    left = parsedate_to_datetime(at).timestamp() - now if at else 0.0
    when = f"not before {at}" if at else "has begun"
    return Notice(f"Azure: {event['EventType']} {when}", left)


def _word_in(answer: MetadataAnswer) -> str:
    """A service's one-word answer; empty for any other, such as the page of some web server."""
    word = answer.body.strip()
    return word if answer.status == 200 and re.fullmatch(r"[\w.+/=-]+", word) else ""


def _body(answer: MetadataAnswer, path: str) -> str:
    if answer.status != 200:
        raise ValueError(f"{path} is answered with status {answer.status}")
    return answer.body


def _fields(body: str) -> dict[str, Any]:
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError(f"no JSON object: {body[:80]!r}")
    return fields


def _text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := fields.get(name), str):
        raise ValueError(f"{name!r} is not a string in {dict(fields)}")
    return value


def _unix_seconds(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# --- requests


def ask_metadata(
    method: str, path: str, headers: Mapping[str, str], timeout: float = PATIENCE
) -> MetadataAnswer:
    """Send a request to this machine's metadata service, bypassing proxies."""
    address = os.environ.get(ADDRESS_VARIABLE, ADDRESS)
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(MOST_BYTES).decode(errors="replace")
        lower_case = {name.lower(): value for name, value in answer.getheaders()}
        return MetadataAnswer(answer.status, lower_case, body)
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def find_cloud(name: str, ask: Ask) -> Cloud | None:
    """The named cloud or, with `auto`, the one that this machine is in; None: no known one."""
    if name != "auto":
        cloud = CLOUDS[name](ask)
        try:
            cloud.is_here()
        except OSError as error:
            log.warning("%s's metadata service doesn't answer: %s", cloud.name, error)
        return cloud
    answered = False
    for make in CLOUDS.values():
        cloud = make(ask)
        try:
            if cloud.is_here():
                return cloud
            answered = True
        except OSError:
            if not answered:
                return None
            if isinstance(cloud, Aws):
                log.warning(
                    "if this is a container on AWS, it can't read notices: set the instance's "
                    "metadata response hop limit to 2"
                )
    return None


def watch_notices(name: str, on_notice: Callable[[Notice], None]) -> None:
    """Poll for a notice in a daemon thread; `on_notice` runs once, on the event loop."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        notice = _await_notice(name)
        if notice is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_notice, notice)

    threading.Thread(target=run, name="notices", daemon=True).start()


def _await_notice(name: str) -> Notice | None:
    """The notice of an end that comes soon; None: this machine is in no cloud that has notices."""
    cloud, trouble = find_cloud(name, ask_metadata), ""
    if cloud is None:
        return None
    log.info("polling %s for notices of this machine's end", cloud.name)
    while True:
        last_trouble, trouble = trouble, ""
        try:
            notice = cloud.find_notice(time.time())
            if notice and (notice.left is None or notice.left <= SOON):
                return notice
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble = f"{type(error).__name__}: {error}"
            if not last_trouble:
                log.warning("%s's notices can't be read: %s", cloud.name, trouble)
        time.sleep(POLL)
