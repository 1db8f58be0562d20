"""``python -P -m tilebudget.kernels.inspect``: see `report`."""

import sys

from .report import main

sys.exit(main())
