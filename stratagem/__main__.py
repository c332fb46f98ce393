"""`python -m stratagem` is the command `stratagem`."""

import sys

from stratagem.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
