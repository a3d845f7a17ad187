"""Runs the `headwise` command as ``python -m headwise``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
