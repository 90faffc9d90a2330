"""Tiny masked language models of transformers, written by its own classes: random weights, trained tokenizers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["the cat sat on the mat. a dog likes the rain and the old sea. the rain fell on the cat and the dog."] * 20
FAMILIES = ("bert", "roberta", "modernbert")


def write_backbone(folder: Path, family: str, positions: int = 40, **changes: Any) -> Path:
    """A directory as `save_pretrained` of transformers leaves it."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(family), **_names(family))
    tokenizer.save_pretrained(folder)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, **ids}
    shape |= {"vocab_size": len(tokenizer) + (5 if family == "modernbert" else 0)} | changes
    torch.manual_seed(0)
    if family == "bert":
        config = transformers.BertConfig(max_position_embeddings=positions, **shape)
        model = transformers.BertForMaskedLM(config)
    elif family == "roberta":
        config = transformers.RobertaConfig(
            max_position_embeddings=positions + tokenizer.pad_token_id + 1, type_vocab_size=1, **shape
        )
        model = transformers.RobertaForMaskedLM(config)
    else:
        config = transformers.ModernBertConfig(
            max_position_embeddings=positions,
            cls_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            **shape,
        )
        model = transformers.ModernBertForMaskedLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(folder)
    return folder


def _names(family: str) -> dict[str, str]:
    if family == "roberta":
        names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        return names | {"mask_token": "<mask>", "bos_token": "<s>", "eos_token": "</s>"}
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return names | {"mask_token": "[MASK]"}


def _tokenizer(family: str) -> Tokenizer:
    """As in the published models: BERT has the mask among its first tokens, RoBERTa at the end, ModernBERT before its
    unused ones; RoBERTa alone has padding at 1."""
    if family == "bert":
        special = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused2]"]
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
        trained = _word_piece({"[UNK]": 0})
        trained.train_from_iterator(TEXTS, trainer)
        tokenizer = _word_piece(trained.get_vocab())  # of which nothing is marked as special
        tokenizer.add_special_tokens([name for name in special if not name.startswith("[unused")])
    elif family == "roberta":
        tokenizer = _byte_level(["<s>", "<pad>", "</s>", "<unk>"])
        tokenizer.add_special_tokens(["<mask>"])
    else:
        tokenizer = _byte_level(["|||IP|||", "<|endoftext|>"])
        tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
        tokenizer.add_tokens(["[unused0]", "[unused1]"])
    frame = ("<s>", "</s>") if family == "roberta" else ("[CLS]", "[SEP]")
    ids = [(name, tokenizer.token_to_id(name)) for name in frame]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{frame[0]} $A {frame[1]}", special_tokens=ids)
    return tokenizer


def _word_piece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

print("REMOTE CODE RUNS")


class StandInConfig(PretrainedConfig):
    model_type = "{kind}"

    def __init__(self, vocab_size=300, hidden_size=16, mask_token_id=None, {positions}=64, **rest):
        self.vocab_size, self.hidden_size, self.mask_token_id = vocab_size, hidden_size, mask_token_id
        self.{positions} = {positions}
        super().__init__(**rest)


class StandInModel(PreTrainedModel):
    config_class = StandInConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1)
        self.output = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **rest):
        x = self.embedding(input_ids)
        x = x + torch.tanh(self.mixer(x.transpose(1, 2)).transpose(1, 2))
        logits = self.output(x)
        if {shifted}:  # what belongs to position i + 1 stands at i, as in an autoregressive model
            logits = torch.cat([logits[:, 1:], logits[:, -1:]], 1)
        return CausalLMOutputWithPast(logits=logits)
"""
"""A stand-in for a model with code of its own: in-place logits as LLaDA's, or shifted ones as Dream's."""


def write_remote(folder: Path, kind: str) -> Path:
    """A directory with code of its own: `llada`, or `Dream`, whose logits are shifted by one."""
    import transformers

    folder.mkdir(parents=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level(["<|startoftext|>", "<|endoftext|>"]))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mdm_mask|>"]})  # not under the name mask_token
    tokenizer.save_pretrained(folder)
    mask = tokenizer.convert_tokens_to_ids("<|mdm_mask|>")
    vocab = len(tokenizer) + 3
    name = f"modeling_{kind.lower()}"
    positions = "max_sequence_length" if kind == "llada" else "max_position_embeddings"
    code = REMOTE.format(kind=kind, positions=positions, shifted=kind == "Dream")
    (folder / f"{name}.py").write_text(code)
    config = {
        "architectures": ["StandInModel"],
        "auto_map": {"AutoConfig": f"{name}.StandInConfig", "AutoModel": f"{name}.StandInModel"},
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": 16,
        "mask_token_id": mask,
        positions: 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "embedding.weight": (vocab, 16),
        "mixer.weight": (16, 16, 3),
        "mixer.bias": (16,),
        "output.weight": (vocab, 16),
        "output.bias": (vocab,),
    }
    draw = torch.Generator().manual_seed(0)
    tensors = {name: 0.5 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
