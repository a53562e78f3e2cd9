"""What every kernel shares: launch options and waiting for the kernel before.

Kernels are launched with programmatic dependent launch: a kernel may start while the one before it still runs, so each
calls ``wait_for_inputs`` before it touches anything an earlier kernel wrote or still reads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)


def options(num_warps, num_stages=1):
    """Keyword arguments of a launch; the interpreter knows fewer of them."""
    common = {"num_warps": num_warps, "num_stages": num_stages}
    return common if triton.knobs.runtime.interpret else common | {"launch_pdl": True}


def dot_precision(dtype):
    """How ``tl.dot`` treats this torch dtype: float32 inputs are multiplied as float32."""
    return "ieee" if dtype.itemsize == 4 else "tf32"


def next_power_of_2(n):
    return triton.next_power_of_2(n)


def cdiv(a, b):
    return -(-a // b)


@triton.jit
def wait_for_inputs():
    """Block until the kernel before has ended and its results can be seen."""
    if ON_GPU:
        gdc_wait()


@triton.jit
def release_dependents():
    """Allow the next kernel's programs to be scheduled; they still wait for this kernel's end."""
    if ON_GPU:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(addresses):
    """Ask the L2 cache for the 128 bytes around each address; nothing waits for them."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )
