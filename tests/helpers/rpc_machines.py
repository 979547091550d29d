"""TVM's RPC tracker and servers as real processes on free ports of this machine, each with its own process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from tests.helpers.ports import free_port
from tests.helpers.waiting import eventually
from tvm import rpc

START_SECONDS = 180.0


@dataclass
class Machines:
    """A tracker and the servers that registered with it."""

    port: int
    key: str
    tracker: subprocess.Popen[bytes]
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def registered(self) -> int:
        with closing(rpc.connect_tracker("127.0.0.1", self.port)) as tracker:
            summary = tracker.summary()
        return sum(str(server["key"]) == f"server:{self.key}" for server in summary["server_info"])

    def kill(self, index: int) -> None:
        """With all its sessions, as when the machine loses power."""
        os.killpg(self.servers[index].pid, signal.SIGKILL)
        self.servers[index].wait()


@contextmanager
def machines(count: int, key: str = "test", threads: int = 1) -> Iterator[Machines]:
    port = free_port()
    made = Machines(port, key, _start("rpc_tracker", threads, "--port", str(port), "--port-end", str(port + 1)))
    try:
        eventually(lambda: _listens(port), "the tracker's start", START_SECONDS)
        for _ in range(count):
            own = free_port()
            made.servers.append(_start("rpc_server", threads, "--tracker", made.address, "--key", key, "--port", str(own),
                                       "--port-end", str(own + 1)))
        eventually(lambda: made.registered() == count, "the servers' start", START_SECONDS)
        yield made
    finally:
        for process in [*made.servers, made.tracker]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(module: str, threads: int, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", f"tvm.exec.{module}", "--host", "127.0.0.1", *arguments],
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                            env={**os.environ, "TVM_NUM_THREADS": str(threads)})


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
