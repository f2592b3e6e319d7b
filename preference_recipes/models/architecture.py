"""What the architecture of a `transformers` model does, and which of its weights text reaches."""

import copy
import math

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils, modeling_flash_attention_utils
from transformers.configuration_utils import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from common import patched, refuse

LINEAR = (nn.Linear, Conv1D)


# ============================================================ from tokens to hidden states
def hidden_states(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Returns the hidden states that a model's head reads, `[rows * row length, h]`."""
    with no_searches():
        output = backbone_of(model)(**inputs, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)


def backbone_of(model: nn.Module) -> nn.Module:
    """Returns the submodule that computes the hidden states for a model's head."""
    if model.base_model is not model:
        return model.base_model
    # Llama 4's causal language model names a submodule that it does not have.
    backbones = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(backbones) == 1:
        return backbones[0]
    refuse(f"{type(model).__name__} is not supported yet: no part gives its hidden states")


def longest_row(model: PreTrainedModel) -> float:
    """Returns how many tokens a model reads if its positions are a learned table; else inf."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    tables = {layer for layer in backbone_of(model).modules() if isinstance(layer, nn.Embedding)}
    tables.discard(model.get_input_embeddings())
    # OPT's and BART's have two rows more.
    return limit if any(0 <= table.num_embeddings - limit < 8 for table in tables) else math.inf


def no_searches():
    """Keeps `transformers` from searching for padding or packed rows, which waits for a GPU."""
    find_nothing = lambda *values: None
    return patched(
        (masking_utils, "find_packed_sequence_indices", find_nothing),
        (modeling_flash_attention_utils, "_is_packed_sequence", find_nothing),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask", find_nothing),
    )


# ============================================================ from hidden states to logits
def logits_formula(model: nn.Module) -> tuple[float, float]:
    """Returns m and c by which logits follow from the head's output x: `c * tanh(m * x / c)`.

    A soft cap c of 0 stands for `m * x`. Both are found by calling the model's own forward with
    known outputs of the head, because each architecture has other names for them in its config.
    """
    head = model.get_output_embeddings()
    # A large number shows the cap, a small one the multiplier; the others prove the formula.
    logits = [1e30, 2.0**-12, 0.0, -60.0, -7.0, -1.0, -0.1, 0.3, 2.0, 11.0, 90.0]
    output = torch.zeros(1, 1, head.out_features, dtype=torch.float64)
    output[0, 0, : len(logits)] = torch.tensor(logits, dtype=torch.float64)[: head.out_features]
    states = KnownStates([torch.zeros(1, 1, head.in_features)])
    backbone = backbone_of(model)
    # Set on the instances, they hide the methods of their classes.
    backbone.forward = lambda *args, **kwargs: states
    head.forward = lambda *args, **kwargs: output
    try:
        ids = torch.zeros(1, 1, dtype=torch.long)
        result = model(input_ids=ids, use_cache=False).logits.double()
    except Exception:  # whatever a forward pass may ask of a backbone
        return 1.0, 0.0  # `checks.check_logprobs` decides whether that is right
    finally:
        del backbone.forward, head.forward

    softcap = 0.0 if result[..., 0].item() > 1e6 else result[..., 0].item()
    multiplier = result[..., 1].item() / logits[1]
    if abs(multiplier - 1) < 1e-6:
        multiplier = 1.0  # up to rounding
    expected = multiplier * output
    if softcap:
        expected = softcap * torch.tanh(expected / softcap)
    if result.shape != output.shape or not torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
        refuse(f"{type(model).__name__}: its logits are made in a way that is not supported yet")
    return multiplier, softcap


class KnownStates(tuple):
    """A backbone's output with hidden states and nothing else."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


# ============================================================ parts of a model
def whole_models(wrapper: nn.Module) -> dict[str, PreTrainedModel]:
    """Returns the outermost Hugging Face models in a module by their paths."""
    models = {}
    for path, module in wrapper.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in models)
        if isinstance(module, PreTrainedModel) and not is_inside:
            models[path] = module
    return models


def unreached_parameters(model: PreTrainedModel) -> set[str]:
    """Returns the names of the parameters that no loss on text can train.

    These are all outside of decoder and head, and DeepSeek's index, whose choice has no gradient.
    """
    parts = [model.get_decoder(), model.get_output_embeddings(), getattr(model, "score", None)]
    reached = {id(p) for part in parts if part is not None for p in part.parameters()}
    return {
        name for name, p in model.named_parameters() if id(p) not in reached or ".indexer." in name
    }


def layers_called(model: PreTrainedModel) -> set[str]:
    """Returns the names of the linear layers that a forward pass calls as such, tried with a copy.

    Excluded are routers with several results, and Mamba's `dt_proj`, which a function uses.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # other implementations read values, which "meta" lacks
    disable_randomness(config)  # no layer is dropped at random
    called = set()

    def note(layer: nn.Module, inputs: tuple, output) -> None:
        size = layer.nf if isinstance(layer, Conv1D) else layer.out_features
        if getattr(output, "shape", None) == (*inputs[0].shape[:-1], size):
            called.add(layer)

    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"):
        # Under ZeRO-3 transformers would copy rotary values out of "meta".
        with patched((PreTrainedModel, "_initialize_weights", lambda *args: None)):
            replica = type(model)(config)
        # In half precision, because "meta" multiplies experts' stacked weights in no other.
        replica.to(torch.bfloat16).train()
        layers = {name: part for name, part in replica.named_modules() if isinstance(part, LINEAR)}
        for layer in layers.values():
            layer.register_forward_hook(note)
        try:
            # DeepSeek V4 uses all of its layers only from 128 tokens on.
            hidden_states(replica, {"input_ids": torch.zeros(1, 150, dtype=torch.long)})
        except Exception:  # such as JetMoE, whose forward pass reads values
            return set(layers)
    return {name for name, layer in layers.items() if layer in called}


def disable_randomness(module: nn.Module | PreTrainedConfig) -> None:
    """Sets dropout and jitter of one module to zero, in place, and in its configs, too."""
    for name, value in list(vars(module).items()):
        if isinstance(value, PreTrainedConfig):
            disable_randomness(value)
        is_dropout = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
        if isinstance(value, float) and (is_dropout or "jitter" in name):
            setattr(module, name, 0.0)


def freeze_unreached(accelerator, wrapper: nn.Module) -> None:
    """Freezes weights that no text reaches, since weight decay would shrink them; prints which."""
    for model in whole_models(wrapper).values():
        unreached = unreached_parameters(model)
        for name in sorted(unreached):
            model.get_parameter(name).requires_grad_(False)
        if unreached:
            count = f"{len(unreached)} weights, such as {min(unreached)}"
            accelerator.print(f"not trained: {count} (text never reaches them)")
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            accelerator.print("not trained: the router's auxiliary loss (output_router_logits)")
