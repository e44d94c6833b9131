"""What this machine's processor can do."""

from __future__ import annotations

import contextlib
import platform
from functools import cache


@cache
def processor() -> str:
    """Its flags, one line; where the system does not tell, its name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        return next((line for line in f if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def cpu_multiplies_bf16() -> bool:
    """AMX or AVX512-BF16 on Linux; elsewhere no."""
    return "amx_bf16" in processor() or "avx512_bf16" in processor()
