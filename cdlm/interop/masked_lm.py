"""Masked language models of transformers (BERT, RoBERTa, ModernBERT, ...) as the network of a `Denoiser`.

Token ids stay those of the tokenizer. The mask of our processes is one more id, `vocab`, which becomes the mask token
of the model, wherever that is in its vocabulary, on the way into the network and nowhere else. Special and unused
tokens, the mask token among them, are `Process.special`: always visible, and never generated.

Models that come with code of their own (LLaDA, Dream) are opened if that code is trusted.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cdlm.data.tokenizer import Tokenizer, has_tokenizer
from cdlm.extras import require
from cdlm.files import read_object
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import LayoutError
from cdlm.process import masked
from cdlm.types import Time, Tokens

SHIFTED = ("dream",)
"""By model_type: models whose output at position i predicts token i + 1, as that of an autoregressive model does."""
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>|madeupword\d+")
_TRUST = "--trust-remote-code (in Python trust_remote_code=True)"


@dataclasses.dataclass(frozen=True)
class Description:
    """All that config.json of a run keeps of such a model: with the weights, enough to build it again."""

    config: dict[str, Any]
    """The model's own config.json."""
    mask_token_id: int
    vocab_size: int
    """Columns of its logits."""
    num_tokens: int
    """Tokens of its tokenizer."""
    special: list[int]
    """Tokens that are never generated."""
    max_length: int
    """Positions, or 0 where there is no limit."""
    remote_code: str | None = None
    """Where its code is, if that is not in transformers."""


class MaskedLMNetwork(nn.Module):
    """A `LogitsNetwork`: the model as it is. The time is not used: masked models see the noise level in their input."""

    def __init__(self, model: Any, description: Description) -> None:
        super().__init__()
        self.model = model
        self.description = description
        self.shifted = str(model.config.model_type).lower() in SHIFTED
        self.first_position = _first_position(model)

    @property
    def display_name(self) -> str:
        """How messages call it."""
        return type(self.model).__name__

    def forward(self, ids: Tokens, t: Time) -> Float[Tensor, "b l v"]:
        output = self._run(ids)
        return torch.cat([output[:, :1], output[:, :-1]], 1) if self.shifted else output

    def save_pretrained(self, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
        """Write a directory that transformers opens with its own classes, and `cdlm.load` too."""
        description, transformers = self.description, _transformers()
        if description.remote_code is not None:
            raise ValueError(f"{self.display_name} runs code of its own, which is not exported; share its checkpoint")
        copied = copy.deepcopy(self)
        if isinstance(copied, SplitMaskedLMNetwork):
            copied.model.set_submodule(copied.head_name, copied.head)
        assert tokenizer.model is not None
        special = {"mask_token": description.mask_token_id, "unk_token": tokenizer.unknown}
        special["pad_token"] = getattr(self.model.config, "pad_token_id", None)
        if _framed(tokenizer):
            special |= {"cls_token": tokenizer.bos, "sep_token": tokenizer.eos}
        names = {name: tokenizer.model.id_to_token(token) for name, token in special.items() if token is not None}
        with _quiet(transformers):
            copied.model.to(dtype).save_pretrained(folder)
            transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.model, **names).save_pretrained(folder)

    def _run(self, ids: Tokens) -> Float[Tensor, "b l columns"]:
        length, limit = ids.shape[1], self.description.max_length
        if limit and length > limit:
            name = self.display_name
            raise ValueError(f"{length} tokens are more than the {limit} positions of {name}; use shorter sequences.")
        ids = ids.masked_fill(ids == self.description.vocab_size, self.description.mask_token_id)
        if not self.first_position:
            return self.model(input_ids=ids).logits
        positions = torch.arange(self.first_position, self.first_position + length, device=ids.device)
        return self.model(input_ids=ids, position_ids=positions.expand_as(ids)).logits


class SplitMaskedLMNetwork(MaskedLMNetwork):
    """A `HiddenStatesNetwork`: the output layer is taken out of the model, so that it runs only where it is needed."""

    def __init__(self, model: Any, description: Description) -> None:
        super().__init__(model, description)
        head: nn.Linear = model.get_output_embeddings()
        self.head_name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(self.head_name, nn.Identity())
        self.head = head

    def hidden_states(self, ids: Tokens, t: Time) -> Float[Tensor, "b l d"]:
        return self._run(ids)

    def forward(self, ids: Tokens, t: Time) -> Float[Tensor, "b l v"]:
        return self.head(self.hidden_states(ids, t))


def open_masked_lm(folder: Path, config: dict[str, Any], trust_remote_code: bool = False) -> Denoiser:
    """A directory that transformers has written, or one of the same layout, as a masked denoiser."""
    transformers = _transformers()
    remote = _check_kind(folder, config, trust_remote_code, transformers)
    if not any(folder.glob("*.safetensors")):
        raise LayoutError(f"{folder} has no weights in safetensors; pickles are never opened")
    mask_token_id, special = _vocabulary(folder, config)
    loader = getattr(transformers, remote or "AutoModelForMaskedLM")
    with _quiet(transformers):
        try:
            model, info = loader.from_pretrained(
                folder, trust_remote_code=bool(remote), use_safetensors=True, dtype="auto", output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise LayoutError(f"transformers cannot open {folder}: {_one_line(error)}") from None
    if info["missing_keys"]:
        raise LayoutError(
            f"{folder} has no weights for {sorted(info['missing_keys'])[0]} of {type(model).__name__}: a model without "
            "its language-modeling head cannot be used"
        )
    model.eval()
    with torch.no_grad():
        vocab = int(model(input_ids=torch.tensor([[mask_token_id]])).logits.shape[-1])
    num_tokens = _tokens(folder).vocab_size
    if num_tokens > vocab:
        raise LayoutError(
            f"{folder} has logits for {vocab} tokens and a tokenizer of {num_tokens}; it is another model's"
        )
    description = Description(
        config=config,
        mask_token_id=mask_token_id,
        vocab_size=vocab,
        num_tokens=num_tokens,
        special=special + list(range(num_tokens, vocab)),
        max_length=_max_length(model),
        remote_code=str(folder.resolve()) if remote else None,
    )
    process = dataclasses.replace(masked(vocab), special=tuple(description.special))
    return Denoiser(_network(model, description), process)


def rebuild(values: dict[str, Any], trust_remote_code: bool = False) -> MaskedLMNetwork:
    """The network that a config.json of ours describes; its weights are random."""
    try:
        description = Description(**values)
    except TypeError as error:
        raise LayoutError(f"config.json describes a masked language model of another version ({error})") from None
    transformers = _transformers()
    if description.remote_code is None:
        config = transformers.AutoConfig.for_model(**description.config)
        model = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
        return _network(model, description)
    folder = Path(description.remote_code)
    if not folder.is_dir():
        raise LayoutError(f"the code of this model was in {folder}, which does not exist; put it back there")
    remote = _check_kind(folder, description.config, trust_remote_code, transformers)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    loader = getattr(transformers, remote or "AutoModel")
    return _network(loader.from_config(config, trust_remote_code=True), description)


def _network(model: Any, description: Description) -> MaskedLMNetwork:
    head = model.get_output_embeddings()
    if description.remote_code is None and isinstance(head, nn.Linear) and _is_last(model, head, description):
        return SplitMaskedLMNetwork(model, description)
    return MaskedLMNetwork(model, description)


@torch.no_grad()
def _is_last(model: Any, head: nn.Linear, description: Description) -> bool:
    """Whether the logits are the output of this layer, and nothing is done to them."""
    found: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: found.append(output))
    logits = model(input_ids=torch.tensor([[description.mask_token_id]])).logits
    hook.remove()
    return len(found) == 1 and found[0].shape == logits.shape and torch.equal(found[0], logits)


def _check_kind(folder: Path, config: dict[str, Any], trust_remote_code: bool, transformers: Any) -> str | None:
    """Refuse what is no masked language model before any of its code runs; the class that opens remote code, if any."""
    kind = str(config.get("model_type"))
    if kind in transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        architectures = config.get("architectures") or []
        if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures) or config.get("is_decoder"):
            raise LayoutError(f"{folder} is a causal language model ({kind}); a masked one is needed, such as BERT")
        return None
    code: dict[str, str] = config.get("auto_map") or {}
    names = [name for name in ("AutoModelForMaskedLM", "AutoModel") if name in code]
    if not names:
        known = kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        what = (
            f"a {kind} model, which is not a masked language model" if known else f"of an unknown model_type, {kind!r}"
        )
        raise LayoutError(
            f"{folder} is {what}; its config.json must describe a model of cdlm, sdtt, mdlm, udlm or duo, or a masked "
            "language model of transformers, such as BERT, RoBERTa or ModernBERT"
        )
    if not trust_remote_code:
        raise LayoutError(f"{folder} runs code of its own ({code[names[0]]}); read it, then add {_TRUST}")
    return names[0]


def _vocabulary(folder: Path, config: dict[str, Any]) -> tuple[int, list[int]]:
    """The mask token, and all tokens that are never generated."""
    tokenizer = _tokens(folder)
    assert tokenizer.model is not None
    mask = config.get("mask_token_id")
    if mask is None:
        name = _mask_token(folder)
        mask = tokenizer.model.token_to_id(name) if name else None
    if not isinstance(mask, int):
        raise LayoutError(f"{folder} has no mask token: neither its config.json nor its tokenizer names one")
    names = {token: name for name, token in tokenizer.model.get_vocab(with_added_tokens=True).items()}
    special = {mask} | {token for token, one in tokenizer.model.get_added_tokens_decoder().items() if one.special}
    special |= {token for token in range(tokenizer.vocab_size) if token not in names or _UNUSED.fullmatch(names[token])}
    if not _framed(tokenizer):
        special -= {tokenizer.eos}  # it is how such a model ends a text
    return mask, sorted(special)


def _framed(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer itself puts texts between two special tokens, as BERT's does."""
    return tokenizer.model is not None and tokenizer.model.encode("").ids == [tokenizer.bos, tokenizer.eos]


def _mask_token(folder: Path) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file():
            token = read_object(folder / file).get("mask_token")
            name = token.get("content") if isinstance(token, dict) else token
            if name:
                return str(name)
    return None


def _tokens(folder: Path) -> Tokenizer:
    if not has_tokenizer(folder):
        raise LayoutError(
            f"{folder} has no tokenizer.json; write one there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return Tokenizer.load(folder)


def _first_position(model: Any) -> int:
    """RoBERTa and its relatives count positions from the id of the padding token on."""
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1


def _max_length(model: Any) -> int:
    """The number of positions; 0 if the configuration does not say."""
    config = model.config
    names = ("max_position_embeddings", "max_sequence_length")
    found = next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), 0)
    return max(0, found - _first_position(model))


def _transformers() -> Any:
    return require("transformers", "eval", "a model of transformers")


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without its progress bar and its report of a directory that it opens: what matters in it is an error here."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _one_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
