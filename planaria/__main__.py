"""The command `planaria`, which is also `python -m planaria`."""

import os
import sys

import planaria

try:
    here = os.getcwd()  # noqa: PTH109  nothing is imported before the path is right
except FileNotFoundError:
    here = ""  # it was removed
if sys.path[0] == here and planaria.__path__[0] != f"{here}/planaria":
    del sys.path[0]  # it may be a downloaded folder with a json.py in it


def main() -> None:
    """Ctrl-C ends it without a traceback, also while it is loaded."""
    try:
        from planaria.node.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
