"""A model as `transformers` knows them: AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True).

`forward(input_ids, timesteps)` gives the logits of f_theta(x_t, t), with carry-over: one column for each clean token.
Times lie in [0, 1], where 1 is pure noise; one for each sequence, or one for all. A model that is not told the time
takes none. `labels` adds a loss: the mean cross entropy where they are not -100.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.model.pretrained import migrate_model_config
from cdlm.process import SCHEDULES, Process

_BYSTANDERS = ("output_attentions", "output_hidden_states", "num_items_in_batch")
"""What transformers itself passes to any model, and this one has no use for."""


class CDLMConfig(PretrainedConfig):
    """A model directory's config.json, of any version."""

    model_type = "cdlm"

    def __init__(
        self,
        vocab_size: int = 256,
        network: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.network = network or {}
        self.process = process
        super().__init__(**rest)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, from a config.json that version 0.1 may have written."""
        if config_dict.get("format") == "cdlm":
            config_dict = migrate_model_config(config_dict)
        return super().from_dict(config_dict, **kwargs)


class CDLMForMaskedLM(PreTrainedModel):
    """The network under the names of its file; the prior is a buffer."""

    config_class = CDLMConfig  # type: ignore[mutable-override]
    main_input_name = "input_ids"
    # a joint head belongs to sampling: the trunk predicts by itself
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"joint_head\."]  # type: ignore[mutable-override]

    def __init__(self, config: CDLMConfig) -> None:
        super().__init__(config)
        if config.process is None:
            raise ValueError("an autoregressive model is no masked language model; open it with cdlm.load")
        if "custom" in config.network:
            name = config.network["custom"]
            raise ValueError(
                f"these are weights of a custom network; open them with cdlm.load(..., network={name}(...))"
            )
        vocab = config.vocab_size
        has_mask = config.process["name"] == "masked" or config.process.get("num_states") == vocab + 1
        self.backbone = DiT(NetworkConfig(**config.network), vocab + has_mask, vocab)
        self.register_buffer("prior", torch.zeros(vocab + has_mask, dtype=torch.float64))
        self._built: list[Denoiser] = []
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Weights come from a file."""

    @property
    def denoiser(self) -> Denoiser:
        """f_theta, over these very weights."""
        if not self._built:
            about = self.config.process
            noise = SCHEDULES[about["noise_schedule"]](eps=about["eps"])
            prior = self.get_buffer("prior").detach().double().cpu()
            process = Process(self.config.vocab_size, prior / prior.sum(), noise)
            with torch.device("meta"):
                found = Denoiser(NetworkConfig(**{**self.config.network, "joint_layers": 0}), process)
            found.backbone = self.backbone
            self._built.append(found)
        return self._built[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        timesteps: torch.Tensor | float | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **rest: Any,
    ) -> MaskedLMOutput | tuple[torch.Tensor, ...]:
        denoiser = self.denoiser
        if attention_mask is not None and not bool((attention_mask == 1).all()):
            raise ValueError("every token sees every other here: give sequences of one length, without padding")
        unknown = [name for name, value in rest.items() if name not in _BYSTANDERS and value is not None]
        if unknown:
            raise TypeError(f"forward takes input_ids, timesteps and labels, and no {', '.join(unknown)}")
        if timesteps is None:
            if denoiser.config.time_conditioning:
                raise ValueError("this model is told the time: give timesteps in [0, 1], one for each sequence")
            timesteps = 0.5  # it makes no difference
        logits = denoiser(input_ids, timesteps)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]
