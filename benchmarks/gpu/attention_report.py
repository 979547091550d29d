"""What the checks and times of the attention kernels found: printed at once and held for a file."""

from __future__ import annotations

from typing import Any

ROWS: list[dict[str, Any]] = []
FAILURES: list[str] = []


def record(kind: str, name: str, case: str, **values: Any) -> None:
    ROWS.append({"kind": kind, "kernel": name, "case": case, **values})
    text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{kind:9s}{name:22s}{case:28s}{text}", flush=True)


def require(ok: bool, what: str) -> None:
    if not ok:
        FAILURES.append(what)
        print("FAILED", what, flush=True)
