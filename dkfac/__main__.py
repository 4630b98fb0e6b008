"""``python -m dkfac``: the command line."""

import sys

from dkfac.tools.cli.main import main

sys.exit(main())
