"""`python -m planaria` is the command `planaria`."""

import os
import sys

import planaria

here = os.getcwd()  # noqa: PTH109  nothing is imported before the path is right
if sys.path[0] == here and planaria.__path__[0] != f"{here}/planaria":
    del sys.path[0]  # it may be a downloaded folder with a json.py in it

from planaria.node.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
