"""Judges of random weights, as transformers saves them."""

from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
import torch

from cdlm.data import END

from ..writers import BPE

transformers = pytest.importorskip("transformers")

WINDOW = 24


def tiny(kind: Literal["gpt2", "llama"], path: Path) -> Path:
    """GPT-2 puts nothing before a text and ends it with <|endoftext|>; a Llama begins with <s> and ends with </s>."""
    torch.manual_seed(0)
    model = tokenizers.Tokenizer.from_str(BPE.model.to_str())
    names = {"eos_token": END}
    if kind == "llama":
        model.add_special_tokens(["<s>", "</s>"])
        start = ("<s>", model.token_to_id("<s>"))
        model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
        names = {"bos_token": "<s>", "eos_token": "</s>"}
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)
    sizes: dict[str, Any] = {"vocab_size": len(words), "bos_token_id": None, "eos_token_id": words.eos_token_id}
    if kind == "llama":
        sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=WINDOW + 1)
        net = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(**sizes, n_positions=WINDOW, n_embd=16, n_layer=2, n_head=2)
        net = transformers.GPT2LMHeadModel(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 0, 0.4)
    net.save_pretrained(path)
    words.save_pretrained(path)
    return path
