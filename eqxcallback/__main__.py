"""`python -m eqxcallback doctor`, `python -m eqxcallback new-kernel NAME`."""

import sys

from .program import main


if __name__ == "__main__":
    sys.exit(main())
