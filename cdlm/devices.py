"""Where and in what precision to compute: the meaning of --device and --dtype, everywhere the same."""

from typing import Literal, get_args

import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float64"]


def pick_device(name: Device = "auto") -> torch.device:
    """The device of that name; `auto` is the best one present."""
    if name not in get_args(Device):
        raise ValueError(f"unknown device {name!r}; choose from {', '.join(get_args(Device))}")
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    if not present[name]:
        raise ValueError(f"this machine has no {name} device that torch can see; use --device auto or --device cpu")
    return torch.device(name)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there; from the host to a GPU without waiting for what it is computing."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def autocast(device: torch.device, dtype: Dtype) -> torch.autocast:
    """Mixed precision for bfloat16 (weights stay in float32); nothing for the others."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def weight_dtype(device: torch.device, dtype: Dtype) -> torch.dtype:
    """The precision that weights are kept in."""
    if dtype not in get_args(Dtype):
        raise ValueError(f"unknown dtype {dtype!r}; choose from {', '.join(get_args(Dtype))}")
    if dtype == "float64" and device.type == "mps":
        raise ValueError("Apple's GPUs have no float64; use --dtype float32 or --device cpu")
    return torch.float64 if dtype == "float64" else torch.float32
