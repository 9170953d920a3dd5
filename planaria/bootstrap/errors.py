"""The base class of errors for people, in a module without imports: commands begin quickly."""


class UserError(Exception):
    """What a person can mend: the message is a sentence that says why, and what to do. Commands
    print it, as they do an OSError or a ValueError, and end with exit status 1."""
