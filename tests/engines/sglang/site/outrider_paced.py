"""The entry point of the paced device, which is beside this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def register():
    """Put the paced device into this process, if $OUTRIDER_PACED asks for it."""
    if os.environ.get("OUTRIDER_PACED") or os.environ.get("OUTRIDER_TEST_RACES"):
        sys.path.append(str(Path(__file__).parents[1]))
        from paced import plugin

        plugin.register()
