"""What the engine prepares: the model that is trained, and models that are only read."""

import contextlib
import copy
import functools

import torch
from accelerate import DistributedDataParallelKwargs
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from transformers import PreTrainedConfig

from common import adapters, engine, optim, zero
from preference_recipes.models import architecture, checks, load, lora, rounding
from preference_recipes.models.logprobs import LogProbModel


def policy(accelerator, args, tokenizer, dropout: bool = True) -> LogProbModel:
    """Returns the model that the arguments name, ready for `for_training`.

    Its parameters are chosen: all that text reaches are trained, or adapters, see
    `choose_parameters`.

    Args:
        args: `SharedArgs`.
        dropout: False: what the recipe compares, policies or answers, must differ in nothing else.
    """
    model = LogProbModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    if not dropout:
        disable_dropout(model)
    choose_parameters(accelerator, model, args)
    return model


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout, and a router's jitter, off for good, also while the model trains.

    What is compared, policies or answers, must differ in nothing else.
    """
    saved_with = {id(whole) for whole in architecture.whole_models(model).values()}
    silent_configs = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout_layer = name == "p" and isinstance(module, nn.Dropout)
            if isinstance(value, float) and (is_noise(name) or is_dropout_layer):
                setattr(module, name, 0.0)
        # Some layers, such as Falcon's, read their config in each forward pass. They get a copy:
        # the actor is saved with the config that it came with.
        if architecture.has_config(module) and id(module) not in saved_with | {id(model)}:
            key = id(module.config)
            if key not in silent_configs:
                silent_configs[key] = without_noise(module.config)
            module.config = silent_configs[key]


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


def choose_parameters(accelerator, model: nn.Module, args) -> None:
    """Decides which weights are trained; prints what is frozen.

    Frozen is what text never reaches and, with `--lora_r`, all but new adapters.

    Args:
        model: a `ModelWrapper`, not prepared yet.
        args: `SharedArgs`.
    """
    architecture.freeze_unreached(accelerator, model, args.max_length)
    lora.add_adapters(accelerator, model, args)


def for_training(accelerator, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Prepares the model that is trained and its optimizer, and returns both.

    This is `accelerator.prepare`, and then puts back the fp32 buffers that DeepSpeed's
    `module.half()` rounds. Rotary frequencies are such buffers. If they stayed rounded, positions
    would drift. The saved actor computes them in fp32 when it is loaded, so it would not be the
    model that was trained.
    """
    if may_skip_modules(model):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    if adapters.has_adapter(model):  # the base below adapters is in no saved actor
        round_frozen(accelerator, model)
    with (
        exact_buffers(accelerator, model),
        zero.exact_masters(accelerator, model, engine.half_precision(accelerator)),
        shared_weights(accelerator, model),
    ):
        model, optimizer = accelerator.prepare(model, optimizer)
    checks.refuse_not_finite(model)
    innermost = engine.innermost_optimizer(optimizer)
    innermost.register_step_post_hook(optim.hold_step_counts)
    if not zero.stage(accelerator):
        innermost.register_step_pre_hook(fill_in_gradients)
    model.train()
    return model, optimizer


def may_skip_modules(model: nn.Module) -> bool:
    """Whether a forward pass may leave out modules that are trained.

    So do mixtures whose experts are modules of their own, and layers that are dropped at random.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and "expert" in name.split(".")[-1]:
            return True
        if getattr(module, "layerdrop", 0):
            return True
    return False


def fill_in_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
    """Makes a missing gradient one of zeros, before an optimizer steps.

    That of an expert which no token of an update visited may be missing. ZeRO takes it as zeros:
    moments and weight decay go on. torch's optimizers would leave the parameter as it is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def frozen(accelerator, model: nn.Module) -> nn.Module:
    """Prepares a model that is only read, such as a reference or a reward model.

    It is on the device, in evaluation mode and in the precision of the trained model. Under ZeRO-3
    and FSDP2 it is sharded like the trained model, not replicated. See `round_frozen` for what it
    holds in half precision.
    """
    model.eval().requires_grad_(False)
    round_frozen(accelerator, model)
    prepared = placed(accelerator, model)
    checks.refuse_not_finite(prepared)
    return prepared


def placed(accelerator, model: nn.Module) -> nn.Module:
    """Returns a model that is only read as the engine holds it, see `frozen`."""
    if accelerator.is_fsdp2:
        # accelerate would look for the trained model's kinds of layers in this one.
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = model._no_split_modules
        with shared_weights(accelerator, model):
            return fsdp2_prepare_model(accelerator, model)
    stage = zero.stage(accelerator)
    if not stage:
        # Under autocast, like the trained model.
        return accelerator.prepare_model(model, evaluation_mode=True)
    with exact_buffers(accelerator, model):
        if stage == 3:
            return zero.shard_frozen(accelerator, model)
        half = engine.half_precision(accelerator)
        return model.to(accelerator.device, half)  # None: it stays in fp32, as it was loaded


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Holds frozen weights in half precision where that changes no output by a single bit.

    See `rounding.rounded_when_read` for which these are. DeepSpeed rounds a model once, in
    `prepare`, and fp32 rounds nothing.

    Args:
        wrapper: a `ModelWrapper`, not prepared yet.
    """
    half = engine.half_precision(accelerator)
    if half is None or zero.stage(accelerator):
        return
    rounded = rounding.rounded_when_read(accelerator, wrapper)
    for name, parameter in wrapper.named_parameters():
        # Packed weights of 4 bits are whole numbers.
        if name in rounded and parameter.dtype == torch.float32 and not parameter.requires_grad:
            parameter.data = parameter.data.to(half)


@contextlib.contextmanager
def shared_weights(accelerator, model: nn.Module):
    """Lets accelerate cut the main process's weights for all, when it prepares the model inside.

    That is what it does under FSDP2 with `fsdp_cpu_ram_efficient_loading`, but for three things: it
    has no place for buffers that are saved, it does not send buffers, and it finds the optimizer's
    parameters by their addresses, which parameters without memory do not have.

    Args:
        model: on the other processes without values, see `load.read_on_main_process`.
    """
    if not (accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading):
        yield
        return
    for parameter in model.parameters():
        if parameter.is_meta:
            parameter.data_ptr = functools.partial(id, parameter)
    saved = []  # the modules with buffers that are saved, and which these are
    for module in model.modules():
        names = set(module._buffers) - module._non_persistent_buffers_set
        for name in module._buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = sent_by_main_process(accelerator, buffer)
        module._non_persistent_buffers_set |= names
        saved.append((module, names))
    yield
    for module, names in saved:
        module._non_persistent_buffers_set -= names


def sent_by_main_process(accelerator, buffer: torch.Tensor) -> torch.Tensor:
    """Returns the values that a buffer has on the main process, on the device."""
    if accelerator.is_main_process:
        values = buffer.to(accelerator.device).contiguous()
    else:
        values = torch.empty(buffer.shape, dtype=buffer.dtype, device=accelerator.device)
    torch.distributed.broadcast(values, src=0)
    return values


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
