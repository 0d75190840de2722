"""Run the command line by `python -m steadynorm.cli`."""

import sys

from steadynorm.cli import main

sys.exit(main())
