"""`relaxpack serve`: a bundle over HTTP, with OpenAI's API and a chat page."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relaxpack.cli.options import Seconds, bundle_argument, device_option, existing_bundle
from relaxpack.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from relaxpack.llm import LLM

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command(short_help="Serve a bundle over HTTP, OpenAI-compatible.")
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
              help="Clients must send this key; repeatable. Better given as RELAXPACK_API_KEY, which nobody sees in `ps`.")
@click.option("--model-name", "names", multiple=True, metavar="NAME",
              help="What clients call the model; repeatable. Default: its own name and that of the bundle.")
@device_option
@click.option("--num-pages", type=click.IntRange(2), metavar="N",
              help="Pages of the KV cache. Default: what the limits need.")
@click.option("--no-warm-up", is_flag=True, help="GPU: leave each CUDA graph to the first request that needs it.")
@click.option("--prefix-store", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Keep cached prefixes here over a restart.")
@click.option("--max-concurrent", type=click.IntRange(1), default=256, show_default=True, metavar="N",
              help="Requests in work; more are answered 429.")
@click.option("--max-body-mib", type=click.IntRange(1), default=8, show_default=True, metavar="N",
              help="Largest request body, in MiB.")
@click.option("--request-timeout", type=Seconds(0), default=600.0, show_default=True, metavar="SECONDS",
              help="For a whole answer; 0 is no limit.")
@click.option("--drain-timeout", type=Seconds(0), default=30.0, show_default=True, metavar="SECONDS",
              help="For running answers after SIGTERM.")
@click.option("--allow-origin", "allow_origins", multiple=True, metavar="ORIGIN",
              help="Let web pages of this origin use the API; repeatable.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True)
def serve(bundle: str, host: str, port: int, api_keys: tuple[str, ...], names: tuple[str, ...], device: str | None,
          num_pages: int | None, no_warm_up: bool, prefix_store: Path | None, max_concurrent: int, max_body_mib: int,
          request_timeout: float, drain_timeout: float, allow_origins: tuple[str, ...], log_level: str) -> None:
    """Serve BUNDLE over HTTP: OpenAI's API under /v1, a chat page at /, Prometheus at /metrics.

    On a GPU every CUDA graph is captured first; /health answers when that is done. Ends on SIGTERM, SIGHUP or Ctrl-C after
    running answers are finished.
    """
    existing_bundle(bundle)
    keys = _keys(api_keys)
    try:
        from relaxpack.runtime.server import serve as server
    except ImportError as error:
        raise EnvironmentProblem(f"the server needs {error.name}: pip install 'relaxpack[serve]'") from error
    from relaxpack.cli.progress import counting
    from relaxpack.llm import LLM
    from relaxpack.runtime.async_engine import AsyncEngine
    from relaxpack.runtime.server.limits import Limits
    from relaxpack.runtime.server.model import ServedModel

    listener = server.listen(host, port)    # before the model is loaded, which takes longer to be in vain
    started = time.perf_counter()
    with counting("weights to the GPU", transfer=True) as progress:
        llm = LLM(bundle, device=device, num_pages=num_pages, progress=progress)
    _prepare(llm, not no_warm_up)
    if prefix_store is not None:
        _load_prefixes(llm, prefix_store, bundle)
    model = ServedModel(AsyncEngine(llm.engine, llm.tokenizer), llm.tokenizer, names or _names(llm, bundle))
    url = server.url_of(listener)
    if host not in _LOOPBACK and not keys:
        click.echo(f"note: everybody who reaches {url} may use it: --api-key asks for a key", err=True)

    def ready() -> None:
        seconds = time.perf_counter() - started
        page = f"chat page at {url}/" if model.engine.generates else "embeddings only"
        click.echo(f"serving {model.name} at {url}/v1, {page} (loaded in {seconds:.1f} s, context "
                   f"{model.engine.max_tokens} tokens)", err=True)
        sys.stderr.flush()
    limits = Limits(max_body_bytes=max_body_mib << 20, max_concurrent=max_concurrent, drain_seconds=drain_timeout,
                    request_seconds=request_timeout or None)
    server.serve(model, listener, limits, api_keys=keys, allow_origins=allow_origins, log_level=log_level, on_ready=ready)
    if prefix_store is not None:
        _save_prefixes(llm, prefix_store, bundle)
    click.echo("stopped", err=True)


def _prepare(llm: LLM, warm_up: bool) -> None:
    """Say what was loaded; on a GPU also what it takes of its memory, and capture its graphs, so that no request waits for
    one."""
    from relaxpack.cli.progress import counting

    if llm.loaded is None:
        return
    report = llm.loaded.report
    click.echo(str(report), err=True)
    if report.note:
        click.echo(f"note: {report.note}", err=True)
    if report.plan is not None:
        click.echo(str(report.plan), err=True)
    if warm_up:
        with counting("CUDA graphs") as progress:
            took = llm.loaded.warm_up(progress)
        if took is not None:
            click.echo(f"{took}; {llm.loaded.compare_plan()}", err=True)


def _keys(given: Sequence[str]) -> list[str]:
    from relaxpack.env import api_key

    keys = list(given) or [key for key in [api_key()] if key]
    if any(not key.strip() or not key.isprintable() for key in keys):
        raise UsageError("--api-key is empty or has characters that no header can carry: choose another key")
    return keys


def _names(llm: LLM, bundle: str) -> list[str]:
    own = [llm.info.name] if llm.info is not None else []
    return list(dict.fromkeys([*own, Path(bundle).resolve().name.removesuffix(".rpk").removesuffix(".bundle")]))


def _model_key(bundle: str) -> str:
    """Names everything that decides what a page of the KV cache holds: every member of the bundle."""
    from relaxpack.dist.bundle import Bundle

    with Bundle.open(bundle) as opened:
        members = sorted((name, member.sha256) for name, member in opened.manifest.members.items())
    return hashlib.sha256(repr(members).encode()).hexdigest()


def _load_prefixes(llm: LLM, folder: Path, bundle: str) -> None:
    from relaxpack.runtime.prefix_store import load_prefixes

    report = load_prefixes(llm.engine, folder, _model_key(bundle))
    click.echo(f"prefix store: {report.pages} pages loaded{f' ({report.reason})' if report.reason else ''}", err=True)


def _save_prefixes(llm: LLM, folder: Path, bundle: str) -> None:
    from relaxpack.runtime.prefix_store import save_prefixes

    report = save_prefixes(llm.engine, folder, _model_key(bundle))
    click.echo(f"prefix store: {report.pages} pages saved{f' ({report.reason})' if report.reason else ''}", err=True)
