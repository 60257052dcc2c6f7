"""``python -m gdn_multi``: see gdn_multi/cli."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
