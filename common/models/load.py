"""Loading a tokenizer and models."""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from common import cpu, zero
from common.data import tokens


def tokenizer_of(name: str):
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


def causal_lm(
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
        tokens.stop_tokens(tokenizer, model)
    )  # so that the saved actor ends its answers as here
    # Else transformers would refuse to save a published one with faults of its own.
    model.generation_config._original_object_hash = hash(model.generation_config)
    return model


def score_model(
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
    own_tokenizer = tokenizer_of(name)
    if own_tokenizer.get_vocab() != tokenizer.get_vocab():
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
        with zero.gathered([model.score.weight], writer=0), torch.no_grad():
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
        cpu.use_onednn()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, set(info["missing_keys"])


def fingerprint(name: str, model) -> list:
    """What identifies a model's weights, as JSON values.

    For a local folder these are its path and the name, size and time of each file in it; for a hub name, the commit.
    """
    folder = Path(name)
    files = []
    if folder.is_dir():
        files = sorted(file for file in folder.glob("*") if file.is_file())
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    where = str(folder.resolve()) if files else name
    return [where, getattr(model.config, "_commit_hash", None), stats]
