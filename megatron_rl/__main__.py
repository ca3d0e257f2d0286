"""`python -m megatron_rl`."""

import sys

from .cli import main

sys.exit(main())
