"""The config.json sizes of well-known models (known_models.yaml), for plans where no hub is asked. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Hub id -> the sizes in its config.json."""
    text = (resources.files("ebbtide.model") / "known_models.yaml").read_text()
    return {
        name: {**group["sizes"], "max_position_embeddings": context}
        for group in yaml.safe_load(text)
        for name, context in group["models"].items()
    }


def known_config(path: str | None) -> PretrainedConfig | None:
    """The transformers config of a well-known hub model, for which no hub is asked; None for any other model."""
    if path is None or path not in known_models() or Path(path).exists():
        return None
    from transformers import AutoConfig

    sizes = deepcopy(dict(known_models()[path]))
    found: PretrainedConfig = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    return found


def hub_id_of(name: str) -> str | None:
    """The known hub id whose last part is this name, if there is exactly one."""
    found = [one for one in known_models() if one.partition("/")[2].lower() == name.lower()]
    official = [one for one in found if not one.startswith("unsloth/")]
    return official[0] if len(official) == 1 else None
