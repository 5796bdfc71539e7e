"""This process as Linux sees it: its age, its memory, the commit it was started from."""

import os
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """Resident bytes: now, and the most there have been."""

    rss_bytes: int
    peak_rss_bytes: int

    @classmethod
    def now(cls) -> "Memory":
        """Of this process."""
        status = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
        return cls(int(status["VmRSS"]) * 1024, int(status["VmHWM"]) * 1024)


def age_s() -> float:
    """Seconds since this process was started, to a hundredth; what it ran before an exec counts."""
    # After the command's name, which may hold anything, even brackets: field 22 is the start in ticks since boot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"
