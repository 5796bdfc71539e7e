"""Logs on stderr, as text or JSON lines. Prompts and secrets are never handed to a logger."""

import logging
import sys
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def configure_logging(name: str, level: str, log_format: LogFormat) -> None:
    """Send every logger's records to stderr.

    Args:
        name: of the process, in each text line.
        level: a logging level name, e.g. "info".
        log_format: "text" or "json" (one object a line).
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # One line per request from these would drown ours.
    for noisy in ("httpx", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
