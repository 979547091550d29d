"""From a checkpoint to a bundle: the one place where the compile-side rooms meet. `build.py` tells the story."""

from relaxpack.compile.build import build_bundle
from relaxpack.compile.options import BuildOptions
from relaxpack.compile.progress import Progress
from relaxpack.compile.report import BuildReport

__all__ = ["BuildOptions", "BuildReport", "Progress", "build_bundle"]
