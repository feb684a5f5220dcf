"""Entry point of `python -m fused_attn`."""

import sys

from fused_attn.tools.cli import main

sys.exit(main())
