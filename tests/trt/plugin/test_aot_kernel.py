"""The kernel of the decode step ahead of time against the twin in NumPy: as g++ makes it for the emulated device, as PTX on a GPU."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.attention import DECODE_CASES
from tests.simt import run
from tests.simt.standin import need_cuda_memory
from tests.trt.plugin.bound import Bound
from trt_kvcache.kernels.sources import source_folder
from trt_kvcache.trt.plugin import aot

need_cuda_memory()


_CASES = {name: DECODE_CASES[name] for name in ("groups", "softcap and scale", "window", "large softcap")}
_CASES["eleven"] = replace(DECODE_CASES["sixteen"], group=11)


@pytest.mark.parametrize("name", list(_CASES))
def test_the_result_is_that_of_numpy(memory, stream, tmp_path, name):
    from cuda.core import LaunchConfig, ObjectCode, launch

    case = replace(_CASES[name], layout="combined", packed=False)
    bound = Bound(case, memory, stream)
    if memory.arch == run.ARCH:
        run.build_kernels(
            source_folder() / "attention/decode_aot.cuh", tmp_path / "kernel", "none", macros=aot.macros(bound.fields, case.dtype)
        )
        code = ObjectCode.from_cubin((tmp_path / "kernel").read_bytes())
    else:
        code = ObjectCode.from_ptx(aot.decode_ptx(bound.fields, case.dtype, memory.arch).encode())
    kernel = code.get_kernel(aot.KERNEL)
    warps, _, nbytes = aot.tiles(case.head_dim)
    config = LaunchConfig(grid=(1, aot.blocks(bound.fields), len(case.lengths)), block=32 * warps, shmem_size=nbytes)
    addresses = [bound.tensors[one].ptr if one in bound.tensors else 0 for one in aot.INPUT_NAMES]
    launch(stream, config, kernel, *addresses, np.int32(case.tokens), bound.out.ptr, bound.tensors["cache"].ptr)
    bound.check(case.dtype)
