"""`python -m twoends` is `twoends`."""

from __future__ import annotations

import sys

from twoends.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
