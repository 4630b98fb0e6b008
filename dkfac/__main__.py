"""``python -m dkfac``: the command line."""

import sys

from dkfac.cli.main import main

sys.exit(main())
