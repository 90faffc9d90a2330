"""Tiny masked language models of transformers, written by its own classes: random weights, trained tokenizers."""

from pathlib import Path
from typing import Any

import torch
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
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        plain = [word for word in special if not word.startswith("[unused")]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
        tokenizer.train_from_iterator(TEXTS, trainer)
        vocab = tokenizer.get_vocab()
        tokenizer = _bert_like(vocab)
        tokenizer.add_special_tokens(plain)
        frame = ("[CLS]", "[SEP]")
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>"] if family == "roberta" else ["|||IP|||", "<|endoftext|>"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
        if family == "roberta":
            tokenizer.add_special_tokens(["<mask>"])
            frame = ("<s>", "</s>")
        else:
            tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
            tokenizer.add_tokens(["[unused0]", "[unused1]"])
            frame = ("[CLS]", "[SEP]")
    ids = [(name, tokenizer.token_to_id(name)) for name in frame]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{frame[0]} $A {frame[1]}", special_tokens=ids)
    return tokenizer


def _bert_like(vocab: dict[str, int]) -> Tokenizer:
    """With this vocabulary, of which nothing is marked as special yet."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
