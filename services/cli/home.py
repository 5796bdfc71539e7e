"""Where models and logs live: the only reader of BATON_HOME."""

import os
from pathlib import Path


def baton_home() -> Path:
    """BATON_HOME, or ~/.cache/baton."""
    return Path(os.environ.get("BATON_HOME") or Path.home() / ".cache" / "baton").expanduser()
