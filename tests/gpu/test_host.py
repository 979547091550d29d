"""What we read from the CUDA driver without TVM equals what TVM sees."""

from __future__ import annotations

import pytest

from relaxpack import tvm_setup
from relaxpack.dist.compat import reasons_against
from relaxpack.dist.host import cuda_driver, detect_host
from relaxpack.target import TargetSpec, local_gpu_arch

pytestmark = pytest.mark.gpu


def test_the_driver_and_tvm_agree() -> None:
    assert tvm_setup.load_cuda_runtime()
    import tvm

    driver = cuda_driver()
    assert driver.version is not None and driver.version >= (13, 0)
    assert tvm.cuda(0).compute_version == "{}.{}".format(*driver.gpus[0].capability)
    assert not tvm.cuda(len(driver.gpus)).exist


def test_code_for_this_gpu_fits_it() -> None:
    assert reasons_against(TargetSpec("cuda", local_gpu_arch()), detect_host()) == ()
    assert reasons_against(TargetSpec("cuda", "sm_10"), detect_host()) != ()
