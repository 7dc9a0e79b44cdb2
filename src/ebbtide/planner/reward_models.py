"""The sizes of reward models, of whatever family. Imports no torch, but where there are some."""

from __future__ import annotations

from ebbtide.config.root import Config
from ebbtide.model.known import known_config
from ebbtide.rollout.reward_costs import RewardModelSize


def reward_model_sizes(config: Config, device_type: str) -> list[RewardModelSize]:
    """The sizes of the reward models, from their files, or of well-known ones from a table. Of any family: the model is
    built without memory for its weights, and its parameters are counted."""
    if not config.reward_models:
        return []
    from ebbtide.model.classifier import meta_classifier

    found = []
    for one in config.reward_models:
        known = known_config(one.path)
        if known is not None:
            known.num_labels = 1 + (one.label or 0)
        model = meta_classifier(one, known)
        shape = model.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding = model.get_input_embeddings().weight.numel()
        mlp = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
        itemsize = one.itemsize(device_type)
        sizes = shape.num_hidden_layers, shape.hidden_size, mlp
        found.append(RewardModelSize(parameters, embedding, itemsize, *sizes, one.batch_tokens))
    return found
