"""``python -m torchgmc`` is ``torchgmc``."""

import sys

from torchgmc.cli import main

if __name__ == "__main__":
    sys.exit(main())
