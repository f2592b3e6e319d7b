"""Loading a tokenizer and models, freezing a reference, preparing a trainable one, right under every strategy."""

import contextlib
import sys

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .data import BadRow, encode_turns, turn_length
from .engine import watch_overflow, zero_stage


def load_tokenizer(name: str):
    """The tokenizer of a model, with an EOS and a pad token.

    Raises:
        SystemExit: no tokenizer there, or one without an EOS: it says what to do.
    """
    tokenizer = from_pretrained(AutoTokenizer, "tokenizer", name)
    if tokenizer.eos_token_id is None:
        sys.exit(
            f"the tokenizer of {name!r} has no EOS token, so a model could not learn to stop: set tokenizer.eos_token and save it"
        )
    # Padding is never read by the loss here, so any id would do; a token of its own would resize the model.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def from_pretrained(auto_class, kind: str, name: str, **kwargs):
    """`auto_class.from_pretrained`, or an exit with the first line of what it says."""
    try:
        return auto_class.from_pretrained(name, **kwargs)
    except Exception as error:  # torn weights, an attention that is not installed, whatever the tokenizer's library raises ...
        sys.exit(
            f"no {kind} could be loaded from {name!r}: {str(error).strip().splitlines()[0]} (expected a Hugging Face folder or a hub name)"
        )


def load_causal_lm(
    name: str, tokenizer, attn_implementation: str | None, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """A causal language model in fp32: autocast and FSDP2 round it to half for each forward pass; DeepSpeed rounds it once, and its
    fp32 masters start from the rounded weights.

    Raises:
        SystemExit: nothing there, an architecture that transformers does not know, or a tokenizer with more tokens than embeddings.
    """
    model, missing = load(
        AutoModelForCausalLM, name, tokenizer, attn_implementation, gradient_checkpointing
    )
    if missing:
        sys.exit(
            f"{name!r} lacks weights, such as {min(missing)}: they would have started at random"
        )
    model.generation_config.eos_token_id = sorted(
        stop_tokens(tokenizer, model)
    )  # so that the saved actor ends its answers as here
    # Else transformers would refuse to save a published one with faults of its own.
    model.generation_config._original_object_hash = hash(model.generation_config)
    return model


def stop_tokens(tokenizer, model) -> set[int]:
    """What ends a response: EOS, what the model's generation config adds, and what ends a turn of the chat template."""
    ids, own = [], model.generation_config.eos_token_id
    with contextlib.suppress(BadRow):  # no template, or one that wants other messages
        ids = encode_turns(
            tokenizer,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            [(1, 2)],
        )[1]
    end = turn_length(tokenizer, ids)
    return {
        tokenizer.eos_token_id,
        *([own] if isinstance(own, int) else own or []),
        *ids[max(end - 1, 0) : end],
    }


def load_score_model(
    name: str,
    tokenizer,
    attn_implementation: str | None,
    gradient_checkpointing: bool = False,
    new_head: bool = False,
):
    """A sequence classifier with one label in fp32: a reward model, or a critic.

    Args:
        new_head: a model without a score head is given one, N(0, 1 / (hidden size + 1)): the outputs begin with variance about 1
            on normalised hidden states (Stiennon et al. 2020, arXiv:2009.01325, and the code of Huang et al. 2024, arXiv:2403.17031).

    Raises:
        SystemExit: nothing there, another tokenizer, no score head though `new_head` is false, or an architecture whose head is of another kind.
    """
    if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
        sys.exit(
            f"{name!r} has another tokenizer than {tokenizer.name_or_path!r}: what is scored in tokens must share them"
        )
    model, missing = load(
        AutoModelForSequenceClassification,
        name,
        tokenizer,
        attn_implementation,
        gradient_checkpointing,
        num_labels=1,
    )
    if type(getattr(model, "score", None)) is not nn.Linear:
        sys.exit(
            f"{type(model).__name__} has no linear layer 'score' over each position: this architecture cannot be scored"
        )
    if missing - {"score.weight"} or (missing and not new_head):
        sys.exit(
            f"{name!r} lacks weights, such as {min(missing)}: expected a reward model with one label, as recipes/reward.py saves it"
        )
    if missing:
        # From the seed, whatever random numbers the strategy's loading has used up.
        start = (
            torch.randn(
                1,
                n := model.score.in_features,
                generator=torch.Generator().manual_seed(torch.initial_seed()),
            )
            / (n + 1) ** 0.5
        )
        with whole([model.score.weight], writer=0), torch.no_grad():
            model.score.weight.copy_(start)
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = (
        tokenizer.pad_token_id
    )  # where transformers stops reading
    return model


def load(
    auto_class,
    name: str,
    tokenizer,
    attn_implementation: str | None,
    gradient_checkpointing: bool,
    **kwargs,
) -> tuple:
    """A model in fp32, and the names of the weights that its folder lacks."""
    kind = (
        "causal language model"
        if auto_class is AutoModelForCausalLM
        else "reward model with one label"
    )
    kwargs |= dict(attn_implementation=attn_implementation, dtype=torch.float32)
    model, info = from_pretrained(auto_class, kind, name, output_loading_info=True, **kwargs)
    # Gemma 3's small models know no images, though their tokenizer has a token for them, beyond all others.
    if len(tokenizer) - hasattr(tokenizer, "image_token") > (
        size := model.config.get_text_config().vocab_size
    ):
        sys.exit(
            f"the tokenizer of {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, but the vocab_size of {name!r} is {size}: use the model's own tokenizer, or resize the model's embeddings and save it"
        )
    if not torch.cuda.is_available() and model.config.get_text_config().hidden_size > 128:
        use_onednn()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, set(info["missing_keys"])


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN, which uses AVX-512 on all that have it, not from MKL, which does on Intel's: on AMD's they
    take half the time. It compiles itself for each new shape, which small models would not pay back.

    The setting's name is that of a permission, to round to bf16 where a CPU has matrix units for it (AMX): there all stays as it was.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    if (torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)).min() > 1:  # bf16 would make 1 of it
        AttentionInterface.register("sdpa", sdpa_of_short_rows)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def sdpa_of_short_rows(module: nn.Module, query: torch.Tensor, *args, **kwargs):
    """transformers' attention; the flash kernel's products are too small for oneDNN where rows are short: there without it."""
    with sdpa_kernel(
        [SDPBackend.MATH] if query.shape[2] < 256 else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    ):
        return sdpa_attention_forward(module, query, *args, **kwargs)


def whole(parameters: list[nn.Parameter], writer: int | None = None):
    """Under ZeRO-3 parameters are cut into shards: inside the block every rank holds the whole of these, and what rank `writer`
    writes into them lasts."""
    if not hasattr(parameters[0], "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout, and a router's jitter, off for good, also while the model trains: what is compared, policies or answers, must
    differ in nothing else."""
    for module in model.modules():
        found = [
            n
            for n in vars(module)
            if "drop" in n or "jitter" in n or (n == "p" and isinstance(module, nn.Dropout))
        ]
        vars(module).update(
            {name: 0.0 for name in found if isinstance(getattr(module, name), float)}
        )


def optimizer_groups(model: nn.Module, weight_decay: float, **settings) -> list[dict]:
    """Parameter groups with weight decay on matrices only, as is usual: not on biases and norms."""
    groups = [{"params": [], "weight_decay": decay, **settings} for decay in (weight_decay, 0.0)]
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        groups[len(getattr(p, "ds_shape", p.shape)) < 2]["params"].append(
            p
        )  # ZeRO-3 hides the shape
    return [group for group in groups if group["params"]]


def prepare(
    accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, debug_overflow: bool = False
):
    """`accelerator.prepare`, then puts back the fp32 buffers that DeepSpeed's `module.half()` rounds.

    Rotary frequencies are such buffers: rounded, positions drift, and the saved actor, whose buffers are computed anew in
    fp32 when it is loaded, would not be the model that was trained.

    Args:
        debug_overflow: see `watch_overflow`.
    """
    if debug_overflow:
        watch_overflow(model)
    with exact_buffers(accelerator, model):
        return accelerator.prepare(model, optimizer)


def prepare_frozen(accelerator, model: nn.Module) -> nn.Module:
    """A model that is only read (a reference, a reward model): on the device, in evaluation mode, in the precision of the
    trained one; under ZeRO-3 and FSDP2 sharded like it, not replicated."""
    model.eval().requires_grad_(False)
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    if not zero_stage(accelerator):
        return accelerator.prepare_model(
            model, evaluation_mode=True
        )  # under autocast as the trained one
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    with exact_buffers(accelerator, model):
        if zero_stage(accelerator) < 3:
            # Where neither is asked for it stays as it was loaded, in fp32.
            return model.to(
                accelerator.device,
                {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision),
            )
        import deepspeed

        zero = {
            key: value
            for key, value in config["zero_optimization"].items()
            if key != "offload_optimizer"
        }
        return deepspeed.initialize(model=model, config={**config, "zero_optimization": zero})[0]


@contextlib.contextmanager
def exact_buffers(accelerator, model: nn.Module):
    """Restores floating-point buffers that the block rounds to half precision."""
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    yield
    for name, buffer in (
        (n, b) for n, b in model.named_buffers() if n in before and b.dtype != before[n].dtype
    ):
        buffer.data = before[name].to(accelerator.device)


def reshard(prepared: nn.Module) -> None:
    """Shards again what FSDP2 leaves whole after a forward that no backward followed: its state could not be saved or loaded."""
    for module in filter(lambda module: isinstance(module, FSDPModule), prepared.modules()):
        module.reshard()
