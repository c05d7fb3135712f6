"""`python -m polymux.cli`: the same as the command `polymux`."""

import sys

from polymux.cli.main import main

sys.exit(main())
