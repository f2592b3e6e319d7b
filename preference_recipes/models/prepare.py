"""Prepares models for the engine: the one that is trained, and those that are only read."""

import collections
import contextlib
import copy

import torch
from accelerate import DistributedDataParallelKwargs
from torch import nn

from common import engine, refuse
from preference_recipes.models import architecture, load
from preference_recipes.models.logprobs import LogProbHead, LogProbModel


# ============================================================ the model that is trained
def policy(accelerator, args, tokenizer, dropout: bool = True) -> LogProbModel:
    """Returns the model that the arguments name, ready for `for_training`.

    Recipes that compare policies turn dropout off: these must differ in their weights alone.
    """
    model = LogProbModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    if not dropout:
        disable_dropout(model)
    choose_parameters(accelerator, model, args)
    return model


def for_training(accelerator, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Prepares the model that is trained and its optimizer, and returns both."""
    if engine.has_adapter(model):  # no saved actor contains the base below adapters
        round_frozen(accelerator, model)
    with exact_buffers(accelerator, model):
        model, optimizer = accelerator.prepare(model, optimizer)
    if not engine.zero_stage(accelerator):
        optimizer.optimizer.register_step_pre_hook(fill_in_gradients)
    model.train()
    return model, optimizer


def fill_in_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
    """Replaces missing gradients, such as an unvisited expert's, by zeros, as ZeRO does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def choose_parameters(accelerator, model: nn.Module, args) -> None:
    """Freezes what text never reaches and, with `--lora_r`, all but new adapters; prints which."""
    if not getattr(args, "train_vision", False):
        architecture.freeze_unreached(accelerator, model)
    elif args.lora_r:
        refuse("--train_vision with --lora_r: adapters are trained in the decoder alone")
    else:  # a tower may have layers that nothing reads
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    if args.lora_r:
        from preference_recipes.models import lora

        lora.add_adapters(model, args)


def disable_dropout(wrapper: nn.Module) -> None:
    """Turns dropout and routers' jitter off for good, also while the model trains."""
    for model in architecture.whole_models(wrapper).values():
        # Some layers, such as Falcon's, read the config in each forward pass. They keep the changed
        # config, and the actor is saved with a copy of the original.
        original = copy.deepcopy(model.config)
        for module in model.modules():
            architecture.disable_randomness(module)
        model.config = original


# ============================================================ models that are only read
def frozen_model(accelerator, model: nn.Module) -> nn.Module:
    """Prepares a model that is only read, with the precision and sharding of the trained one."""
    model.eval().requires_grad_(False)
    round_frozen(accelerator, model)
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        # Otherwise accelerate would look for the trained model's layer classes in this one.
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
        return model.to(accelerator.device, half)  # None: it stays in fp32


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Stores frozen weights in half precision where that changes no output by a single bit.

    Under FSDP2, which rounds weights when it gathers them, these are all; otherwise those that
    autocast rounds. DeepSpeed rounds a model itself.
    """
    half = engine.half_precision(accelerator)
    if half is None or engine.zero_stage(accelerator):
        return
    if accelerator.is_fsdp2:
        weights = list(wrapper.parameters())
    else:
        weights = rounded_by_autocast(wrapper, accelerator.device.type == "cpu")
    for weight in weights:
        # Weights packed into 4 bits are integers.
        if weight.is_floating_point() and not weight.requires_grad:
            weight.data = weight.data.to(half)


def rounded_by_autocast(wrapper: nn.Module, on_cpu: bool) -> list[nn.Parameter]:
    """Returns the weights of linear layers, which autocast rounds in every use.

    A weight shared with another module, such as the embeddings, is used in fp32 there. Score heads
    compute in fp32, and so do output layers on a CPU. GPU kernels of recurrent layers read weights
    in their own way, so models with such layers are left out.
    """
    if any(model._is_stateful for model in architecture.whole_models(wrapper).values()):
        return []
    layer_types = architecture.LINEAR if on_cpu else (*architecture.LINEAR, LogProbHead)
    modules = list(wrapper.modules())
    uses = collections.Counter(id(p) for m in modules for p in m.parameters(recurse=False))
    weights = [module.weight for module in modules if type(module) in layer_types]
    return [weight for weight in weights if uses[id(weight)] == 1]


@contextlib.contextmanager
def exact_buffers(accelerator, model: nn.Module):
    """Restores buffers, such as rotary frequencies, that DeepSpeed rounds to half precision."""
    originals = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    yield
    for name, buffer in model.named_buffers():
        if name in originals and buffer.dtype != originals[name].dtype:
            buffer.data = originals[name].to(accelerator.device)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module):
    """Puts all modules into evaluation mode inside the block, then restores their modes."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
