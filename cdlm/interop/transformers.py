"""The classes of `modeling_cdlm.py` for model directories whose code imports the package, as earlier versions wrote it.

Their config.json may be of version 1, which the file in newer directories does not read.
"""

from typing import Any

from cdlm.interop import modeling_cdlm
from cdlm.model.pretrained import migrate_model_config


class CDLMConfig(modeling_cdlm.CDLMConfig):
    """A model directory's config.json, of any version."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if config_dict.get("format") == "cdlm":
            config_dict = migrate_model_config(config_dict)
        return super().from_dict(config_dict, **kwargs)


class CDLMForMaskedLM(modeling_cdlm.CDLMForMaskedLM):
    config_class = CDLMConfig  # type: ignore[assignment]
