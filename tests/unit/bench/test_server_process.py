"""A server under measurement: what its processes cost."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.server_process import running

# Answers /health, and burns what is asked for: `/own/S` here, `/child/S` in a process of its own that lives on.
SERVER = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
BURN = "import sys, time\\nwhile time.process_time() < float(sys.argv[1]): pass\\nprint(flush=True)\\ntime.sleep(600)"
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        kind, _, seconds = self.path[1:].partition("/")
        if kind == "own":
            until = time.process_time() + float(seconds)
            while time.process_time() < until:
                pass
        if kind == "child":
            subprocess.Popen([sys.executable, "-c", BURN, seconds], stdout=subprocess.PIPE).stdout.readline()
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("asked, at_least", [("own/0.002", 0.002), ("own/0.3", 0.3), ("child/0.3", 0.3)])
def test_processor_time_of_a_server_and_its_children(tmp_path: Path, asked: str, at_least: float) -> None:
    with running(lambda port: [sys.executable, "-c", SERVER, str(port)], tmp_path / "log", 60) as server:
        before = server.cpu_seconds()
        urllib.request.urlopen(f"{server.url}/{asked}", timeout=60).close()
        assert at_least <= server.cpu_seconds() - before < at_least + 0.5, "nothing else runs in it"
