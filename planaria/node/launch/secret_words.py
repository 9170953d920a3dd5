"""Secrets on a command line, which the list of processes shows to all users of the machine."""

from __future__ import annotations

from collections.abc import Sequence

VARIABLES = {"--join": "PLANARIA_JOIN", "--token": "PLANARIA_TOKEN"}
"""Environment variables for them, which other users don't see, by option."""
INVITE = "planaria1."
"""Prefix of an invite (bootstrap/invites.py)."""


def taken_out(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without options that may have secrets, and these as environment variables."""
    kept, values, left = [], dict[str, str](), iter(words)
    for word in left:
        option, is_one, value = word.partition("=")
        if option in VARIABLES:
            values[VARIABLES[option]] = value if is_one else next(left, "")
        else:
            kept.append(word)
    return kept, values


def warnings(words: Sequence[str]) -> list[str]:
    """Warnings about visible secrets."""
    _, values = taken_out(words)
    token = values.get("PLANARIA_TOKEN", "")
    seen = {
        "--join": ("invite", values.get("PLANARIA_JOIN", "").startswith(INVITE)),
        "--token": ("token", bool(token) and not token.startswith("@")),
    }
    return [
        f"whoever is on this machine sees the {what} in its list of processes: put it into a file, "
        f"and say {option} @FILE, or into {VARIABLES[option]}"
        for option, (what, is_seen) in seen.items()
        if is_seen
    ]
