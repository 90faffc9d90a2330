"""What the benchmarks share: options, a network with random weights that says something, a clock, and peak memory."""

import argparse
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process


def arguments(about: str | None) -> tuple[argparse.ArgumentParser, bool]:
    """The options of every benchmark, and whether it will run on a GPU, which other defaults suit."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    gpu = first.parse_known_args()[0].device == "cuda"
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=kind, parents=[first])
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument("--out", type=Path, help="write the table as JSON (and a plot, where there is one)")
    return parser, gpu


def network(shape: NetworkConfig, process: Process | None, vocab: int, device: str, dtype: torch.dtype) -> Denoiser:
    """Random weights, with a head sharp enough that tokens differ in probability as those of text do."""
    torch.manual_seed(0)
    denoiser = Denoiser(dataclasses.replace(shape, causal=process is None), process, vocab).eval().requires_grad_(False)
    for name, parameter in denoiser.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    torch.nn.init.normal_(denoiser.backbone.vocab_embed.embedding, std=1.0)
    torch.nn.init.normal_(denoiser.backbone.output_layer.linear.weight, std=0.08)
    return denoiser.to(device, dtype)


def timed(work: Callable[[int], object], device: str, repeats: int) -> tuple[float, float]:
    """Median seconds of a run after one to warm up, and the peak memory of a run in GiB, weights included."""
    work(0)
    _wait(device)
    _forget_peak(device)
    seconds = []
    for repeat in range(1, repeats + 1):
        began = time.perf_counter()
        work(repeat)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), _peak(device)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"
