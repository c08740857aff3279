"""`python -m mdsp` is the `mdsp` command."""

import sys

from mdsp.cli import main

sys.exit(main())
