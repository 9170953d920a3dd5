"""Secrets on a command line, which the list of processes shows to all users of the machine."""

from __future__ import annotations

from collections.abc import Sequence

VARIABLES = {"--join": "PLANARIA_JOIN", "--token": "PLANARIA_TOKEN"}
"""Environment variables for them, which other users don't see, by option."""
INVITE = "planaria1."
"""Prefix of an invite (bootstrap/invites.py)."""


def without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line without options that may have secrets, and these as environment variables."""
    public, values, rest = [], dict[str, str](), iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in VARIABLES:
            values[VARIABLES[option]] = value if equals else next(rest, "")
        else:
            public.append(word)
    return public, values


def secret_warnings(words: Sequence[str]) -> list[str]:
    """Warnings about secrets on a command line that other users can see."""
    _, values = without_secrets(words)
    token = values.get("PLANARIA_TOKEN", "")
    secrets = {
        "--join": ("invite", values.get("PLANARIA_JOIN", "").startswith(INVITE)),
        "--token": ("token", bool(token) and not token.startswith("@")),
    }
    return [
        f"other users of this machine can see the {secret} in its list of processes: put it into a "
        f"file and give {option} @FILE, or set {VARIABLES[option]}"
        for option, (secret, is_visible) in secrets.items()
        if is_visible
    ]
