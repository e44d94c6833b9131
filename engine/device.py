"""What the machine is and gives: device, precision, peak speed, compilation, and memory that is not handed back and forth."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable

import torch
from torch import nn

from ops.processor import cpu_multiplies_bf16

# Dense peaks in TFLOP/s as (half precision, float32 with TF32 off), from the vendors' data sheets, by a word of the device's name.
PEAKS = {
    "B200": (2250, 80), "H200 NVL": (835, 60), "H200": (989, 67), "H100 NVL": (835, 60), "H100 PCIe": (756, 51), "H100": (989, 67),
    "GH200": (989, 67), "A100": (312, 19.5),
    "L40S": (362, 91.6), "L40": (181, 90.5), "L4": (121, 30.3), "A10G": (70, 31.2), "A10": (125, 31.2), "A6000": (155, 38.7),
    "RTX 4090": (165, 82.6), "RTX 3090": (71, 35.6), "V100": (125, 15.7), "T4": (65, 8.1),
}


def pick_device(name: str) -> torch.device:
    """auto: CUDA, else MPS, else the CPU. ValueError where the one named is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is no device: auto, cpu, cuda, cuda:1 or mps") from None
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not there.get(device.type, False) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ValueError(f"device={name!r} is not on this machine: leave it at auto, or say cpu")
    return device


def pick_dtype(name: str, device: torch.device, n_embd: int) -> torch.dtype:
    """What the device multiplies in. auto is bfloat16 where it has that in hardware and the matrices are wide enough to gain,
    float16 on older CUDA, float32 elsewhere. What is asked for and not to be had falls to the next best, with one line:

                 CUDA, Ampere on    CUDA before     MPS              CPU
    bfloat16     yes                float16         yes              yes
    float16      yes                yes             float32 (it has  bfloat16, or float32 where
                                                    no scaler)       that is not in hardware
    """
    on_cuda, on_cpu = device.type == "cuda", device.type == "cpu"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else not on_cpu or cpu_multiplies_bf16()
    if name == "auto":
        if on_cuda:
            return torch.bfloat16 if has_bf16 else torch.float16
        return torch.bfloat16 if on_cpu and has_bf16 and n_embd >= 128 else torch.float32    # narrower, casts cost more than is gained
    if name == "bfloat16" and on_cuda and not has_bf16:
        return instead(name, "float16", torch.cuda.get_device_name(device))
    if name == "float16" and not on_cuda:
        return instead(name, "bfloat16" if on_cpu and has_bf16 else "float32", "this processor" if on_cpu else "MPS")
    return getattr(torch, name)


def instead(asked: str, got: str, where: str) -> torch.dtype:
    print(f"{where} does not train in {asked}: {got} takes its place", file=sys.stderr)
    return getattr(torch, got)


def autocast(device: torch.device, dtype: torch.dtype):
    """Matrix products in `dtype`; weights stay float32."""
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that the device could do, or None where its name is not in the table: no MFU is better than a wrong one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    half, single = next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b(?!.*Laptop)", name)), (0, 0))
    return 1e12 * (single if dtype == torch.float32 else half) or None


def peak_memory(device: torch.device) -> float | None:
    """GB, the most so far: of tensors on CUDA, else of the whole process; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:                        # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def compiled(model: nn.Module, wanted: bool | None, device: torch.device) -> Callable[..., torch.Tensor]:
    """torch.compile, where it is wanted (None: on CUDA) and works; otherwise the model itself, after one warning."""
    if not (device.type == "cuda" if wanted is None else wanted):
        return model
    fast = torch.compile(model)
    verdict: dict[str, bool | None] = {"works": None}

    def run(*args, **kwargs):
        if verdict["works"] is False:
            return model(*args, **kwargs)
        try:
            out = fast(*args, **kwargs)
        except Exception as e:                 # once it has worked, only what the compiler says is the compiler's
            if isinstance(e, torch.OutOfMemoryError) or (verdict["works"] and not isinstance(e, torch._dynamo.exc.TorchDynamoException)):
                raise
            reason = (str(e).splitlines() or [""])[0][:100]
            print(f"warning: torch.compile does not work here ({type(e).__name__}: {reason}); going on without it", file=sys.stderr)
            verdict["works"] = False
            return model(*args, **kwargs)
        verdict["works"] = True
        return out

    return run


def keep_memory() -> None:
    """glibc gives large blocks back to the system and page-faults on the next use: on 16384 x 1536 bfloat16 a GELU takes 25 ms,
    9.8 once blocks are kept. To be called before the first large tensor; elsewhere than on glibc it does nothing."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 64 << 20)
