"""Reads from a `transformers` model what its architecture does, and what text never reaches."""

import contextlib
import logging
import math
import re
import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.utils.generic import is_flash_attention_requested

from common import engine, replaced
from preference_recipes.models.packing import Packer

# Tokens of a first, quick look at what text reaches.
SHORT_ROW = 16

# What attention adds to the score of a token that is not seen. torch itself takes this number for
# cuDNN's kernel, which makes NaN of -inf. The exponential of it is zero.
HIDDEN = -65504.0

# Names of what reads images and sound.
OTHER_SENSES = re.compile(r"vision|visual|image|video|audio|speech|multi_?modal|\bmm_")


# ============================================================ from tokens to logits
def backbone_of(model: nn.Module) -> nn.Module:
    """Returns the part of a model that gives the hidden states which its head reads.

    Raises:
        SystemExit: there is none that we could find.
    """
    if model.base_model is not model:
        return model.base_model
    # Llama 4's causal language model names a part that it does not have.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) == 1:
        return parts[0]
    sys.exit(
        f"{type(model).__name__}: we could not find which of its parts gives the hidden states: "
        "this architecture is not supported yet"
    )


def hidden_states(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Returns the hidden states that a model's head reads, `[rows * row length, h]`.

    Args:
        inputs: those of a batch, see `Packer.make_batch`.
    """
    if "attention_mask" in inputs:
        inputs = inputs | {"attention_mask": as_numbers(model, inputs["attention_mask"])}
    with no_searches():
        output = backbone_of(model)(**inputs, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)


def as_numbers(model: nn.Module, mask: torch.Tensor) -> torch.Tensor:
    """Returns a bool mask as the numbers that attention adds to its scores, in their dtype.

    torch would compute them of a bool mask in every layer, and keep those of each layer for the
    backward pass. One tensor does for all layers. The log-probs are the same bit for bit.
    """
    if hasattr(model.config.get_text_config(), "index_topk"):
        return mask  # DeepSeek's index reads it, too, in a dtype of its own
    if torch.is_autocast_enabled(mask.device.type):
        dtype = torch.get_autocast_dtype(mask.device.type)
    else:
        # Not `.weight`: within a forward pass ZeRO-3 would gather what is asked for by its name.
        weight = next(model.get_input_embeddings().parameters())
        if isinstance(weight, DTensor):
            return mask  # FSDP2 computes in another dtype than that of the shards
        dtype = weight.dtype
    # Where a row does not begin at a multiple of 8, the kernel for masks on a GPU would copy them.
    *shape, length = mask.shape
    padded_length = math.ceil(length / 8) * 8
    numbers = torch.zeros(*shape, padded_length, dtype=dtype, device=mask.device)
    return numbers[..., :length].masked_fill_(~mask, HIDDEN)


def no_searches():
    """Keeps `transformers` from looking at the values of rows without a mask, inside the block.

    It looks at positions, for rows that hold several sequences, and some architectures look for
    padding, to warn. The host would wait for a GPU to answer. Our rows of several sequences always
    have a mask, and what is padded needs none.
    """

    def find_nothing(*values):
        return None

    return replaced(
        (masking_utils, "find_packed_sequence_indices", find_nothing),
        (modeling_flash_attention_utils, "_is_packed_sequence", find_nothing),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask", find_nothing),
    )


class KnownStates:
    """What a backbone returns, with hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index):
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def logits_formula(model: nn.Module) -> tuple[float, float]:
    """Returns the multiplier m and the soft cap c by which logits follow from the head's output.

    The formula is `c * tanh(m * output / c)`, or `m * output` if c is 0. It is read from what the
    model's own forward makes of known outputs, because each architecture has another name for these
    numbers in its config, and `logits_scaling` multiplies in one and divides in another. No weight
    is read, so ZeRO-3 may have cut them.

    Raises:
        SystemExit: the architecture does something else to its logits.
    """
    head = model.get_output_embeddings()
    size = head.out_features
    # A large number shows the cap, a small one the multiplier; the others prove the formula.
    known = [1e30, 2.0**-12, 0.0, -60.0, -7.0, -1.0, -0.1, 0.3, 2.0, 11.0, 90.0]
    output = torch.zeros(1, 1, size, dtype=torch.float64)
    output[0, 0, : len(known)] = torch.tensor(known, dtype=torch.float64)[:size]
    logits = own_logits(model, head, output)
    if logits is None:
        return 1.0, 0.0  # `checks.check_logprobs` decides whether that is right
    result = logits.double()

    softcap = 0.0 if result[..., 0].item() > 1e6 else result[..., 0].item()
    multiplier = result[..., 1].item() / known[1]
    if abs(multiplier - 1) < 1e-6:
        multiplier = 1.0  # but for rounding
    expected = multiplier * output
    if softcap:
        expected = softcap * torch.tanh(expected / softcap)
    if result.shape != output.shape or not torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
        sys.exit(
            f"{type(model).__name__}: its logits are not its head's output, scaled and soft-capped "
            "as we know it: this architecture is not supported yet"
        )
    return multiplier, softcap


def own_logits(model: nn.Module, head: nn.Module, output: torch.Tensor) -> torch.Tensor | None:
    """Returns the logits that a model makes of the output of its head; None if it fails.

    Args:
        output: `[1, 1, vocabulary]`.
    """
    backbone = backbone_of(model)
    hidden = torch.zeros(1, 1, head.in_features)
    # Set on the instances, they hide the methods of their classes.
    backbone.forward = lambda *args, **kwargs: KnownStates(hidden)
    head.forward = lambda *args, **kwargs: output
    try:
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except Exception:  # whatever a forward pass may ask of a backbone
        return None
    finally:
        del backbone.forward, head.forward


# ============================================================ how far positions reach
def positions_of(model: PreTrainedModel) -> int | None:
    """Returns how many positions a model has a table for; None if it computes any position."""
    config = model.config.get_text_config()
    if config.model_type == "mpt":
        return config.max_seq_len  # its table of biases is made anew in each forward pass
    limit = getattr(config, "max_position_embeddings", None)
    decoder = backbone_of(model).get_decoder()
    # A learned table is a parameter, perhaps of a module that is named so. GPT-J's fixed one is a
    # buffer of each layer. A buffer in a module of its own, such as XGLM's, grows when it must.
    tables = {name: name.split(".")[-2:] for name, _ in decoder.named_parameters()}
    tables |= {name: name.split(".")[-1:] for name, _ in decoder.named_buffers()}
    tensors = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    for name, parts in tables.items():
        shape = getattr(tensors[name], "ds_shape", tensors[name].shape)  # ZeRO-3 empties it
        is_of_positions = any(re.search("pos|wpe", part) for part in parts)
        # OPT's table has two entries more than positions.
        if limit and is_of_positions and len(shape) == 2 and 0 <= shape[0] - limit <= 2:
            return limit
    return None


# ============================================================ attention
def uses_varlen(attn_implementation: str | None) -> bool:
    """Whether attention is told where the sequences of a row begin, and takes no mask of them.

    Args:
        attn_implementation: as `from_pretrained` takes it. None is sdpa, which takes a mask.
    """
    return attn_implementation is not None and is_flash_attention_requested(
        requested_attention_implementation=attn_implementation
    )


def attention_equals_rest(models: list[PreTrainedModel]) -> int:
    """Returns the row length at which causal attention costs as much as the rest of the models.

    A token takes 2 operations for each parameter of the layers, and 2 for each token that it sees
    and each number of a query, for its scores and again for the values that they weigh. It sees
    half of its row on average. A mixture's token visits some of the experts only.
    """
    parameters = 0.0
    numbers_of_queries = 0
    for model in models:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers_of_queries += config.num_hidden_layers * heads * head_size
        parameters += parameters_a_token_meets(model)
    return max(1, round(parameters / numbers_of_queries))


def parameters_a_token_meets(model: PreTrainedModel) -> float:
    """Counts the numbers in the weights of the layers; of experts only the part that is visited."""
    experts, visited = experts_of(model)
    embeddings = model.get_input_embeddings().weight
    total = 0.0
    for parameter in model.get_decoder().parameters():
        if parameter is not embeddings:
            share = (visited or 1) / experts if holds_experts(parameter) else 1.0
            total += engine.size_of(parameter) * share
    return total


def experts_of(model: PreTrainedModel) -> tuple[int, int | None]:
    """Returns how many experts a layer has, 1 without a mixture, and how many a token visits.

    The second is None where the config does not say it by the usual name.
    """
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(getattr(config, name, None) or 1 for name in names)
    return experts, getattr(config, "num_experts_per_tok", None)


def holds_experts(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds the matrices of all experts of a layer, one after the other."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
    return len(shape) == 3


# ============================================================ what text reaches
def freeze_unreached(accelerator, wrapper: nn.Module, max_length: int) -> None:
    """Freezes the modules that no text of this run reaches, and prints which.

    These are towers for images and sound, their projectors, and heads that no loss reads. An
    optimizer would let weight decay shrink them. The experts of a mixture are reached, even if no
    token visits one: which ones a text visits is not looked at.

    Also prints that the auxiliary loss of a router is not trained, if the config asks for it.

    Args:
        wrapper: a `ModelWrapper`, not prepared yet. Under ZeRO-3 its weights may be cut already.
        max_length: tokens of the longest row.
    """
    unreached = unreached_parameters(wrapper, max_length)
    for name, parameter in wrapper.named_parameters():
        if name in unreached:
            parameter.requires_grad_(False)
    names = []
    for path, model in whole_models(wrapper).items():
        parameters = dict(model.named_parameters())
        trained = {
            part for name, p in parameters.items() if p.requires_grad for part in path_to(name)
        }
        for name in parameters:
            if f"{path}.{name}" in unreached:
                # The largest module around it in which nothing is trained.
                names.append(next(part for part in path_to(name) if part not in trained))
    if names:
        # The layers of a model are many, and actor and critic may be alike: named once.
        once = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
        accelerator.print(f"not trained: {', '.join(once)} (text never reaches them)")

    configs = [model.config.get_text_config() for model in whole_models(wrapper).values()]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        accelerator.print(
            "not trained: the router's auxiliary loss, for which the config asks by "
            "output_router_logits (no recipe's loss includes it)"
        )


def whole_models(wrapper: nn.Module) -> dict[str, PreTrainedModel]:
    """Returns the Hugging Face models in a module by their paths, without the models inside them.

    PPO's module holds two: the actor's and the critic's.
    """
    models = {}
    for path, module in wrapper.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in models)
        if isinstance(module, PreTrainedModel) and not is_inside:
            models[path] = module
    return models


def unreached_parameters(wrapper: nn.Module, max_length: int) -> set[str]:
    """Returns the names of the trainable parameters that no text reaches."""
    of_other_senses = set()
    for path, model in whole_models(wrapper).items():
        of_other_senses |= {f"{path}.{name}" for name in parameters_of_other_senses(model)}
    unreached = without_gradient(wrapper, min(SHORT_ROW, max_length))
    if unreached - of_other_senses and max_length > SHORT_ROW:
        # Longer texts may reach more, such as a summary of many tokens.
        unreached &= without_gradient(wrapper, max_length)
    trainable = {name for name, parameter in wrapper.named_parameters() if parameter.requires_grad}
    return (unreached | of_other_senses) & trainable


def without_gradient(wrapper: nn.Module, length: int) -> set[str]:
    """Returns the names of the parameters that get no gradient from a row of `length` tokens.

    Forward and backward pass run on tensors that have shapes but no values. So no weight is read,
    no memory is taken, and all processes find the same under every engine. An architecture whose
    path depends on values cannot be followed like this. For it the set is empty.
    """
    with without_values(wrapper, length) as (parameters, forward), torch.enable_grad():
        try:
            output = forward()
            results = output.values() if isinstance(output, dict) else [output]
            sum(result.sum() for result in results).backward()
        except Exception:  # whatever an architecture may do with values
            return set()
    return {name for name, parameter in parameters.items() if parameter.grad is None}


@contextlib.contextmanager
def without_values(wrapper: nn.Module, length: int):
    """Gives parameters that have shapes but no values, and a forward pass with them.

    Yields:
        The parameters by name, and a function without arguments that reads a row of `length` tokens
        and returns the wrapper's output. It fails where an architecture's path depends on values.
    """
    batch = Packer(torch.device("cpu")).make_batch([[0]], [[0] * max(1, length - 1)])
    with plain_layers(wrapper), FakeTensorMode(allow_non_fake_inputs=True):
        parameters = {}
        for name, parameter in wrapper.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
            values = torch.empty(shape, dtype=parameter.dtype)
            parameters[name] = nn.Parameter(values, requires_grad=values.is_floating_point())
        buffers = {
            name: torch.empty(buffer.shape, dtype=buffer.dtype)
            for name, buffer in wrapper.named_buffers()
        }
        yield (
            parameters,
            lambda: torch.func.functional_call(wrapper, {**parameters, **buffers}, (batch,)),
        )


def plain_layers(wrapper: nn.Module):
    """Lets experts be computed by plain batched products, and attention by sdpa, inside the block.

    The kernels that are used otherwise do not run without values in every dtype, or not without a
    GPU. torch would also log what fails; whoever calls us deals with that.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    changes: list = [(logger, "disabled", True)]
    configs = {
        id(module.config): module.config for module in wrapper.modules() if has_config(module)
    }
    # A config sets its parts' settings, too, so each part's own come after it.
    for config in configs.values():
        attention = config._attn_implementation
        changes += [
            (config, "_experts_implementation", "batched_mm"),
            (config, "_attn_implementation", "sdpa" if uses_varlen(attention) else attention),
        ]
    return replaced(*changes)


def has_config(module: nn.Module) -> bool:
    """Whether a module has the config of a `transformers` model."""
    return isinstance(vars(module).get("config"), PreTrainedConfig)


def parameters_of_other_senses(model: PreTrainedModel) -> set[str]:
    """Returns the names of the parameters of towers and projectors, by their place and name.

    Some of them get a gradient from text, but one of zeros.
    """
    of_decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    found = set()
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(prefix=path))
        beside_decoder = not any(id(parameter) in of_decoder for parameter in parameters.values())
        if beside_decoder and OTHER_SENSES.search(path):
            found |= set(parameters)
    return found


def path_to(name: str) -> list[str]:
    """Returns `a`, `a.b` and `a.b.c` of the name `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
