"""Server processes of the tests' own for exchange: a web server that takes uploads, one that only serves (with or without
listings), and one that speaks S3. Each is a program run beside the tests, on a free port that it prints.

    python exchange_servers.py web FOLDER [no-uploads] [no-listing]
    python exchange_servers.py s3 BUCKET
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    uploads, listing = True, True

    def do_PUT(self) -> None:
        if not self.uploads:
            return self.send_error(405)
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{self.client_address[1]}")
        beside.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        beside.replace(path)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def list_directory(self, path):  # type: ignore[no-untyped-def, override]
        if self.listing:
            return super().list_directory(path)
        return self.send_error(403)


def _serve_web(folder: str, *without: str) -> None:
    handler = type("Handler", (_Handler,), {"uploads": "no-uploads" not in without, "listing": "no-listing" not in without,
                                            "protocol_version": "HTTP/1.1"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder))
    print(server.server_address[1], flush=True)
    server.serve_forever()


def _serve_s3(bucket: str) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="a", aws_secret_access_key="b",
                 region_name="us-east-1").create_bucket(Bucket=bucket)
    print(port, flush=True)
    sys.stdin.read()                         # until the tests close it


@contextmanager
def _running(*arguments: str) -> Iterator[str]:
    """The address of a server of `main`, "127.0.0.1:PORT"."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdigit(), f"the server {arguments} did not start"
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


@contextmanager
def web_server(folder: Path, *without: str) -> Iterator[str]:
    with _running("web", str(folder), *without) as address:
        yield f"http://{address}"


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """The environment in which s3:// means the server; it has an empty `bucket`."""
    with _running("s3", bucket) as address:
        yield {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "tuner", "AWS_SECRET_ACCESS_KEY": "secret",
               "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


if __name__ == "__main__":
    {"web": _serve_web, "s3": _serve_s3}[sys.argv[1]](*sys.argv[2:])
