"""`python -m planaria` is the command `planaria`."""

from planaria.node.cli import main

if __name__ == "__main__":
    main()
