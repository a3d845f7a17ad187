"""Runs the `headwise` command as ``python -m headwise``."""

import sys

if __name__ == "__main__":
    if (
        not sys.flags.safe_path
    ):  # then `-m` put the working folder first, which may be a model folder
        del sys.path[0]
    from .cli import main

    sys.exit(main())
