"""--device and --dtype mean the same everywhere, and say what to use instead."""

import pytest
import torch

from cdlm import devices
from cdlm.devices import few_threads, pick_device, weight_dtype


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


@pytest.mark.parametrize(
    ("kind", "parameters", "told", "expected"),
    [
        ("cuda", 10**8, None, 1),
        ("cuda", 10**8, "3", 3),
        ("cpu", 10**8, None, 3),
        ("cpu", 10**5, None, 1),
        ("cpu", 10**5, "3", 3),
    ],
)
def test_the_host_of_a_gpu_and_a_small_network_have_one_thread_unless_told_otherwise(
    kind: str, parameters: int, told: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    if told is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    try:
        torch.set_num_threads(3)
        with few_threads(torch.device(kind), parameters):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_weights_are_wide_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "_no_bfloat16", lambda: None)
    assert weight_dtype(cpu, "bfloat16") == weight_dtype(cpu, "float32") == torch.float32
    assert weight_dtype(cpu, "float64") == torch.float64
    with pytest.raises(ValueError, match="no float64"):
        weight_dtype(torch.device("mps"), "float64")
    with pytest.raises(ValueError, match="choose from"):
        weight_dtype(cpu, "float16")


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        ("import os; os.kill(os.getpid(), 4)", "a trial was killed by signal 4"),
        ("raise RuntimeError", "a trial failed"),
        ("pass", None),
    ],
)
def test_bfloat16_is_tried_before_it_is_used_on_a_cpu(
    trial: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal instruction kills a process without a word; it must not be this one."""
    monkeypatch.setattr(devices, "_TRIAL", trial)
    monkeypatch.setattr(devices, "_no_bfloat16", devices._no_bfloat16.__wrapped__)
    cpu = torch.device("cpu")
    assert weight_dtype(cpu, "float32") == weight_dtype(torch.device("cuda"), "bfloat16") == torch.float32
    if reason is None:
        assert weight_dtype(cpu, "bfloat16") == torch.float32
    else:
        with pytest.raises(ValueError, match=rf"\({reason}\): use --dtype float32, or .*ONEDNN_MAX_CPU_ISA"):
            weight_dtype(cpu, "bfloat16")
