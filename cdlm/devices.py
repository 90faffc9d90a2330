"""Where and in what precision to compute: the meaning of --device and --dtype, everywhere the same.

torch is imported when a function runs: configurations refer to the types `Device` and `Dtype`, and must start fast.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float64"]

SMALL = 1_000_000
"""Parameters below which threads gain nothing on a CPU."""


def pick_device(name: Device = "auto") -> "torch.device":
    """The device of that name; `auto` is the best one present."""
    import torch

    if name not in get_args(Device):
        raise ValueError(f"unknown device {name!r}; choose from {', '.join(get_args(Device))}")
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    if not present[name]:
        raise ValueError(f"this machine has no {name} device that torch can see; use --device auto or --device cpu")
    return torch.device(name)


def send(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """The tensor on the device; from the host to a GPU without waiting for what it is computing."""
    import torch

    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    if device.type == "mps" and tensor.dtype == torch.float64:  # Apple's GPUs have no double
        return tensor.float().to(device)
    return tensor.to(device)


@contextlib.contextmanager
def few_threads(device: "torch.device", parameters: int) -> Iterator[None]:
    """One thread for the host of a GPU, and for a network too small to share, unless OMP_NUM_THREADS says otherwise.

    Threads wait for the slowest of them, and on cores that other processes use that is long: what the host does in a
    step took one thread 0.6 ms, and two threads on two busy cores 47 ms.
    """
    import torch

    before = torch.get_num_threads()
    if (device.type != "cpu" or parameters < SMALL) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(device: "torch.device", dtype: Dtype) -> "torch.autocast":
    """Mixed precision for bfloat16 (weights stay in float32); nothing for the others."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def weight_dtype(device: "torch.device", dtype: Dtype) -> "torch.dtype":
    """The precision that weights are kept in; refuses what the device cannot compute in."""
    import torch

    if dtype not in get_args(Dtype):
        raise ValueError(f"unknown dtype {dtype!r}; choose from {', '.join(get_args(Dtype))}")
    if dtype == "float64" and device.type == "mps":
        raise ValueError("Apple's GPUs have no float64; use --dtype float32 or --device cpu")
    if dtype == "bfloat16" and device.type == "cpu" and (reason := _no_bfloat16()):
        raise ValueError(
            f"this CPU does not compute in bfloat16 ({reason}): use --dtype float32, or keep torch from instructions "
            "that it announces and does not have: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 cdlm ..."
        )
    return torch.float64 if dtype == "float64" else torch.float32


_TRIAL = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a).sum() == 64**3"


@functools.cache
def _no_bfloat16() -> str | None:
    """Why a small product in bfloat16 fails on this CPU, if it does.

    Tried in a process of its own, which may die of it. Virtual machines announce instructions (AMX) that they do not
    run, so the flags of a CPU prove nothing.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no trial could be made
    killed = f"a trial was killed by signal {-done.returncode}"
    return None if done.returncode == 0 else killed if done.returncode < 0 else "a trial failed"
