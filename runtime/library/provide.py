"""What a bundle's kernels call beyond themselves: each library it names is loaded, and its functions made known to TVM. None
is needed by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxpack.errors import BundleError


def provide(libraries: Mapping[str, Any], device: Any) -> int:
    """Register the functions that a bundle's kernels call (`TargetEntry.libraries`); bytes of device memory that they take
    for their work. Raises BundleError for a library this relaxpack does not know, EnvironmentProblem for one that is not
    installed."""
    taken = 0
    for name in libraries:
        if name != "cublaslt":
            raise BundleError(f"kernels of this bundle call the library {name!r}, which this relaxpack does not know: "
                              "install the relaxpack that built it, or newer")
        from relaxpack.runtime.library import cublaslt

        taken += cublaslt.register(device)
    return taken
