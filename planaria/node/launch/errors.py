"""Errors of a node that can't serve, in a module without imports: begin.py loads few."""

from planaria.bootstrap.errors import UserError


class NodeError(UserError):
    """Error of a node that can't serve; the message says why and what to do."""


class NodeCrashed(Exception):  # noqa: N818  what it did
    """Error of a node that has joined; another process may not have it."""


class SwarmError(UserError):
    """Error of a local swarm; the message says why it can't start or continue, and what to do."""
