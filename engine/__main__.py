"""`python -m engine`: see `engine.process`."""

import sys

from engine.process import main

sys.exit(main())
