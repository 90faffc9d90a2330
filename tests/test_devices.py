"""--device and --dtype mean the same everywhere, and say what to use instead."""

import pytest
import torch

from cdlm.devices import pick_device, weight_dtype


def test_auto_finds_a_device_and_names_are_kept() -> None:
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    assert pick_device("cpu") == torch.device("cpu")


def test_missing_and_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="choose from auto, cpu"):
        pick_device("tpu")
    missing = [
        kind
        for kind, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
        if not there
    ]
    for kind in missing:
        with pytest.raises(ValueError, match="--device cpu"):
            pick_device(kind)


def test_weights_are_wide_only_when_asked() -> None:
    cpu = torch.device("cpu")
    assert weight_dtype(cpu, "bfloat16") == weight_dtype(cpu, "float32") == torch.float32
    assert weight_dtype(cpu, "float64") == torch.float64
    with pytest.raises(ValueError, match="no float64"):
        weight_dtype(torch.device("mps"), "float64")
    with pytest.raises(ValueError, match="choose from"):
        weight_dtype(cpu, "float16")
