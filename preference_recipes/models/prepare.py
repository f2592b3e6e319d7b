"""What the engine prepares: the model that is trained, and models that are only read."""

import contextlib
import copy
import sys

import torch
from torch import nn
from transformers import PreTrainedConfig

from common import engine
from common.adapters import has_adapter
from preference_recipes.models import architecture, load
from preference_recipes.models.logprobs import LogProbModel


# ============================================================ the model that is trained
def policy(accelerator, args, tokenizer, dropout: bool = True) -> LogProbModel:
    """Returns the model that the arguments name, ready for `for_training`.

    Args:
        dropout: False where a recipe compares policies, which must differ in their weights alone.
    """
    model = LogProbModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    if not dropout:
        disable_dropout(model)
    choose_parameters(accelerator, model, args)
    return model


def for_training(accelerator, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Prepares the model that is trained and its optimizer, and returns both.

    This is `accelerator.prepare`, and then puts back the fp32 buffers that DeepSpeed's
    `module.half()` rounds. Rotary frequencies are such buffers. If they stayed rounded, positions
    would drift, and the saved actor, which computes them in fp32, would be another model.
    """
    if has_adapter(model):  # the base below adapters is in no saved actor
        round_frozen(accelerator, model)
    with exact_buffers(accelerator, model):
        model, optimizer = accelerator.prepare(model, optimizer)
    if not engine.zero_stage(accelerator):
        optimizer.optimizer.register_step_pre_hook(fill_in_gradients)
    model.train()
    return model, optimizer


def fill_in_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
    """Makes a missing gradient one of zeros, before an optimizer steps, as ZeRO does.

    That of an expert which no token of an update visited may be missing.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def choose_parameters(accelerator, model: nn.Module, args) -> None:
    """Freezes what text never reaches and, with `--lora_r`, all but new adapters; prints which."""
    architecture.freeze_unreached(accelerator, model)
    if args.lora_r:
        from preference_recipes.models import lora

        lora.add_adapters(accelerator, model, args)
        return
    unused = dict(lora_alpha=None, lora_dropout=0.0, lora_target_modules=["all-linear"])
    unused["load_in_4bit"] = False
    for name, default in unused.items():
        if getattr(args, name) != default:
            sys.exit(f"--{name} has no meaning without adapters: give --lora_r, such as 16")


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout, and a router's jitter, off for good, also while the model trains."""
    saved_with = {id(whole) for whole in architecture.whole_models(model).values()}
    silent_configs = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout_layer = name == "p" and isinstance(module, nn.Dropout)
            if isinstance(value, float) and (is_noise(name) or is_dropout_layer):
                setattr(module, name, 0.0)
        # Some layers, such as Falcon's, read their config in each forward pass. They get a copy:
        # the actor is saved with the config that it came with.
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(module) not in saved_with | {id(model)}:
            if id(config) not in silent_configs:
                silent_configs[id(config)] = without_noise(config)
            module.config = silent_configs[id(config)]


def is_noise(name: str) -> bool:
    """Whether an attribute of this name, if it is a number, makes a forward pass random."""
    return "drop" in name or "jitter" in name


def without_noise(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config in which dropout and jitter are zero."""
    copied = copy.deepcopy(config)
    for name, value in list(vars(copied).items()):
        if isinstance(value, PreTrainedConfig):
            setattr(copied, name, without_noise(value))
        elif isinstance(value, float) and is_noise(name):
            setattr(copied, name, 0.0)
    return copied


# ============================================================ models that are only read
def frozen(accelerator, model: nn.Module) -> nn.Module:
    """Prepares a model that is only read, in the precision and the shards of the trained one."""
    model.eval().requires_grad_(False)
    round_frozen(accelerator, model)
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        # accelerate would look for the trained model's kinds of layers in this one.
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = model._no_split_modules
        return fsdp2_prepare_model(accelerator, model)
    stage = engine.zero_stage(accelerator)
    if not stage:
        # Under autocast, like the trained model.
        return accelerator.prepare_model(model, evaluation_mode=True)
    with exact_buffers(accelerator, model):
        if stage == 3:
            import deepspeed

            # A model without an optimizer has none to offload.
            config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
            config["zero_optimization"].pop("offload_optimizer", None)
            return deepspeed.initialize(model=model, config=config)[0]
        half = engine.half_precision(accelerator)
        return model.to(accelerator.device, half)  # None: it stays in fp32, as it was loaded


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Holds frozen weights in half precision where that changes no output by a single bit."""
    # DeepSpeed rounds a model once, in `prepare`, and fp32 rounds nothing.
    if engine.half_precision(accelerator) and not engine.zero_stage(accelerator):
        from preference_recipes.models import half

        half.round_frozen(accelerator, wrapper)


@contextlib.contextmanager
def exact_buffers(accelerator, model: nn.Module):
    """Restores the floating-point buffers that the block rounds to half precision."""
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    yield
    for name, buffer in model.named_buffers():
        if name in before and buffer.dtype != before[name].dtype:
            buffer.data = before[name].to(accelerator.device)
