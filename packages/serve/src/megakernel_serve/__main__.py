"""``python -m megakernel_serve`` is the command ``megakernel``."""

import sys

from megakernel_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
