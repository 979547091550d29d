"""The one door to TVM keeps PyTorch out, and only out of TVM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_tvm_does_not_import_torch_but_others_may():
    code = ("import sys, relaxpack.tvm_setup, tvm; assert 'torch' not in sys.modules, 'TVM imported torch'; "
            "import torch; print(tvm.runtime.from_dlpack(torch.ones(2)).numpy().tolist())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[1.0, 1.0]\n", done.stderr
