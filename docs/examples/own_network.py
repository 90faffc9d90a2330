"""Train a network of your own with MCDLM on a made-up language: half a minute on a CPU, nothing to download.

python docs/examples/own_network.py [STEPS]
"""

import dataclasses
import random
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import cdlm
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.train import train
from cdlm.train.recipes import RECIPES


class RecurrentNetwork(nn.Module):
    """Reads in both directions, and ignores the time: MCDLM is not time-conditioned."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size + 1, width)  # the last id is the mask
        self.layers = nn.GRU(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, vocab_size)  # predicts clean tokens only, never the mask

    def hidden_states(self, ids: Tensor, t: Tensor) -> Tensor:
        return self.layers(self.embedding(ids))[0]

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        return self.head(self.hidden_states(ids, t))


home, draw = Path("runs/own-network"), random.Random(0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
who, does = ["the cat", "the dog", "an old man", "the sea"], ["sees", "hears", "likes"]
sentences = [f"{draw.choice(who)} {draw.choice(does)} {draw.choice(who)}." for _ in range(4800)]
stories = [" ".join(sentences[k : k + 12]) for k in range(0, 4800, 12)]
home.mkdir(parents=True, exist_ok=True)
corpus = home / "corpus.txt"
corpus.write_text("\n<|endoftext|>\n".join(stories))
prepared = {"train_vocab_size": 300, "seq_length": 64, "valid_documents": 8}  # the last eight stories are held out
settings = PrepareConfig(files=(str(corpus),), out=home / "data", overwrite=True, **prepared)
vocab_size = prepare(settings, Console()).vocab

torch.manual_seed(0)  # fixes the initial weights; data order and noise follow from the seed of the configuration
config = dataclasses.replace(RECIPES["tiny-mcdlm"].config, data=home / "data", out=home / "run", steps=steps)
checkpoint = train(config, "auto", network=RecurrentNetwork(vocab_size))  # "auto": a run that was stopped goes on

pipe = cdlm.load(checkpoint, network=RecurrentNetwork(vocab_size))  # copies the EMA weights into the network
print(pipe.sample(num_samples=1, steps=32)[0])
found = pipe.nelbo(stories[-8:])
print(f"{found.nats_per_token:.3f} +- {found.nats_per_token_error:.3f} nats per held-out token")

token_ids = pipe.encode("the cat [MASK] the sea.")
blank = token_ids.index(pipe.mask_token_id)
probs, candidates = pipe.log_probs([token_ids], t=0.2)[0, blank].exp().topk(3)
for prob, token in zip(probs.tolist(), candidates.tolist(), strict=True):
    print(f"{prob:.3f} {pipe.tokenizer.decode([token])}")
for verb, one in zip(("sees", "cat"), pipe.score("the cat ___ the sea.", ["sees", "cat"]), strict=True):
    print(f"{one.log_likelihood:.2f} nats: the cat {verb} the sea.")
