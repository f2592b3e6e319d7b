"""What a model costs: the operations of training, and of attention beside the rest."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from common import engine
from common.adapters import has_adapter
from preference_recipes.models import architecture


class Flop(NamedTuple):
    """The operations of training for each token that the layers, and the output layer, compute.

    Both are 0 where they are not known.
    """

    of_token: float = 0.0
    of_target: float = 0.0


def flop(wrapper: nn.Module) -> Flop:
    """Returns the operations that training takes: the products with weights alone.

    For each trained parameter these are 2 in the forward and 4 in the backward pass; for each
    frozen one below an adapter 2 and 2. A score head, a single row, is not counted. Where the
    config does not say how many of a mixture's experts a token visits, nothing is known.
    """
    of_token = 0.0
    of_target = 0.0
    for model in architecture.whole_models(wrapper).values():
        experts, visited = experts_of(model)
        if experts > 1 and visited is None:
            return Flop()
        of_frozen = 4 if has_adapter(model) else 0
        for weight, share in weights_met(model):
            for_each = 6 if weight.requires_grad else of_frozen
            of_token += for_each * engine.size_of(weight) * share
        head = model.get_output_embeddings()
        if head is not None:
            for_each = 6 if head.weight.requires_grad else of_frozen
            of_target += for_each * engine.size_of(head.weight)
    return Flop(of_token, of_target)


def attention_equals_rest(models: list[PreTrainedModel]) -> int:
    """Returns the row length at which causal attention costs as much as the rest of the models.

    A token takes 2 operations for each parameter of the layers, and 2 for each token that it sees
    and each number of a query, for its scores and again for the values that they weigh. It sees
    half of its row on average.
    """
    parameters = 0.0
    numbers_of_queries = 0
    for model in models:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers_of_queries += config.num_hidden_layers * heads * head_size
        parameters += sum(engine.size_of(weight) * share for weight, share in weights_met(model))
    return max(1, round(parameters / numbers_of_queries))


def weights_met(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, float]]:
    """Yields the weights of the layers without embeddings, and what share of each a token meets.

    The matrices of a mixture's experts are stacked, and a token visits some of them.
    """
    experts, visited = experts_of(model)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(table.weight) for table in embeddings}
    for parameter in model.get_decoder().parameters():
        if id(parameter) not in looked_up:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
            yield parameter, (visited or 1) / experts if len(shape) == 3 else 1.0


def experts_of(model: PreTrainedModel) -> tuple[int, int | None]:
    """Returns how many experts a layer has, 1 without a mixture, and how many a token visits.

    The second is None where the config does not say it by the usual name.
    """
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(getattr(config, name, None) or 1 for name in names)
    return experts, getattr(config, "num_experts_per_tok", None)
