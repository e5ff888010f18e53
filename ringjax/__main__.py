"""``python -m ringjax`` is the command `ringjax`."""

import sys

from ringjax.cli.main import main

sys.exit(main())
