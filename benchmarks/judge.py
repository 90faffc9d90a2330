"""Judging texts: ours, and one text at a time with the whole law in float32, in one process on the same network.

python -m benchmarks.judge --device cpu --num 16
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.network import arguments, machine, network, timed
from cdlm.data.tokenizer import Tokenizer
from cdlm.eval.scorer import open_judge
from cdlm.model.config import SIZES
from cdlm.model.pretrained import save_denoiser
from cdlm.rng import seeded


def main() -> None:
    parser, gpu = arguments(__doc__)
    parser.set_defaults(vocab_size=257, hidden_size=768 if gpu else 384, num_layers=12 if gpu else 8)
    parser.add_argument("--seq-length", type=int, default=1024 if gpu else 256)
    parser.add_argument("--num", type=int, default=64 if gpu else 16)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    size = SIZES["110m"] if chosen.hidden_size == 768 else SIZES["small"]
    judged = network(size, None, 257, "cpu", torch.float32)
    ids = seeded(0, "texts", batch=chosen.num).integers(chosen.seq_length, 95) + 32
    lengths = (
        seeded(0, "lengths", batch=chosen.num).integers(1, chosen.seq_length // 2)[:, 0] + chosen.seq_length // 2
    ).tolist()
    texts = [bytes(row[:n]).decode() for row, n in zip(ids.tolist(), lengths, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        save_denoiser(judged, folder)
        Tokenizer.load("bytes").save(Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps({**config, "text": {"max_length": chosen.seq_length}}))
        judge = open_judge(folder, chosen.device)
    plain_net = judged.to(chosen.device)

    @torch.no_grad()
    def plain(_: int) -> list[float]:
        found = []
        for text in texts:
            x = torch.tensor([[256, *text.encode()]], device=chosen.device)
            law = plain_net(x)[0, :-1]
            found.append(-float(law.gather(-1, x[0, 1:, None]).double().sum()))
        return found

    def ours(_: int) -> list[float]:
        return [score.nats for score in judge.score(texts)]

    off = max(abs(a / b - 1) for a, b in zip(plain(0), ours(0), strict=True))
    rows: list[dict[str, Any]] = []
    for name, work in (("plain", plain), ("ours", ours)):
        seconds, memory = timed(work, chosen.device, chosen.repeats)
        speed = sum(lengths) / seconds
        rows.append({"column": name, "seconds": seconds, "tokens_per_second": speed, "gib": memory})
        print(f"{name:>6}: {seconds:.3f} s, {speed:,.0f} tokens/s, {memory:.1f} GiB")
    print(f"{machine(chosen.device)}; the two differ by {off:.1e}")
    if chosen.out:
        chosen.out.write_text(json.dumps({"machine": machine(chosen.device), "rows": rows}, indent=1) + "\n")
    print(f"speed-up {rows[1]['tokens_per_second'] / rows[0]['tokens_per_second']:.1f} x")


if __name__ == "__main__":
    main()
