"""How long commands take that compute nothing, beside importing torch once.

    python -m benchmarks.startup

Each line is the median of several runs in processes of their own, taken in turn, and its ratio to
`python -c "import torch"`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import cdlm": ["-c", "import cdlm"],
    "cdlm --help": ["-m", "cdlm", "--help"],
    "cdlm sample --help": ["-m", "cdlm", "sample", "--help"],
    "cdlm train tiny-mcdlm --help": ["-m", "cdlm", "train", "tiny-mcdlm", "--help"],
    "cdlm recipes": ["-m", "cdlm", "recipes"],
    "cdlm nonsense": ["-m", "cdlm", "nonsense"],
}


def seconds(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True, env={**os.environ, "COLUMNS": "120"})
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    measured: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, words in COMMANDS.items():
            measured[name].append(seconds(words))
    torch = statistics.median(measured["import torch"])
    for name, values in measured.items():
        median = statistics.median(values)
        print(f"{name:<30} {median:6.2f} s   {median / torch:6.3f} of import torch")


if __name__ == "__main__":
    main()
