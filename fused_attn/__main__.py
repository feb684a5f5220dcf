"""`python -m fused_attn`."""

import sys

from fused_attn.cli import main

sys.exit(main())
