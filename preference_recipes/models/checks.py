"""Whether a model is read correctly, tried before training: log-probs, answers in one row."""

import contextlib
import sys

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common import engine
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


@torch.no_grad()
def check_logprobs(accelerator: Accelerator, model: nn.Module, ids: list[int]) -> None:
    """Compares our log-probs with those of the architecture's own logits, on some ids.

    All processes must call it. The model is a `LogProbModel`, prepared.
    """
    row = (ids * 2)[:16]  # twice, because ids may be one token, which nothing predicts
    batch = Packer(accelerator.device).make_batch([row[:1]], [row[1:]])
    with evaluation_mode(model):
        output = model(batch, check=True)
    differences = (output["logps"] - output["own_logps"]).abs()
    # The median, because half precision may round a single logit the other way, by any amount, and
    # a router near a tie may choose another expert.
    typical = differences.median().item()
    largest = output["own_logps"].abs().max().item()
    tolerance = 1e-2 if engine.half_precision(accelerator) else 1e-5
    if not typical <= tolerance * (1 + largest):  # also where weights are not finite
        sys.exit(
            f"{models_inside(model)[0].config.name_or_path}: its head's log-probs differ from its "
            f"own logits' by {typical:.3g}: this architecture is not supported yet, or its weights "
            "are not finite"
        )


def models_inside(model: nn.Module) -> list[PreTrainedModel]:
    """Returns the Hugging Face models in a module; PPO's module holds two."""
    return list(architecture.whole_models(model).values())


def make_packer(
    accelerator: Accelerator,
    models: list[nn.Module | None],
    *,
    max_length: int,
    share: bool,
    varlen: bool = False,
) -> Packer:
    """Returns how answers are laid out as rows, so that these models read each as if alone.

    All processes must call it.

    Args:
        models: all that will read the rows, prepared, or None.
        max_length: tokens of the longest row.
        share: whether prompts and rows are shared, if all models read packed rows alike.
        varlen: rows are packed for flash attention, see `Packer`.
    """
    readers = [model for model in models if model is not None]
    if not share or not all(can_pack(accelerator, model, max_length, varlen) for model in readers):
        return Packer(accelerator.device)
    inside = [model for reader in readers for model in models_inside(reader)]
    return Packer(
        accelerator.device,
        share=True,
        varlen=varlen,
        attention_equals_rest=architecture.attention_equals_rest(inside),
    )


def can_pack(
    accelerator: Accelerator, prepared: nn.Module, max_length: int, varlen: bool = False
) -> bool:
    """Whether a model reads several answers in one row as it reads each alone.

    It does not where attention or positions are of another kind than usual, or where something
    besides attention carries information between tokens (recurrent layers).

    Args:
        max_length, varlen: see `make_packer`.
    """
    # Those of whole models: the parts of one have other configs, such as a vision tower's.
    configs = [model.config.get_text_config() for model in models_inside(prepared)]
    if not all(attends_to_whole_rows(config, max_length, varlen) for config in configs):
        return False
    sizes = [config.vocab_size for config in configs]
    sizes += [part.vocabulary for part in prepared.modules() if isinstance(part, LogProbModel)]
    packer = Packer(accelerator.device, share=True, varlen=varlen)
    return reads_packed_alike(prepared, min(sizes), packer)


def attends_to_whole_rows(config: PreTrainedConfig, longest: int, varlen: bool) -> bool:
    """Whether attention reaches over a whole row, and takes a mask, or lengths, as usual."""
    kind = config._attn_implementation
    takes_rows = architecture.uses_varlen(kind) if varlen else kind == "sdpa"
    windows = [
        getattr(config, name, None) or longest
        for name in ("sliding_window", "attention_chunk_size", "index_topk")
    ]
    return takes_rows and min(windows) >= longest and not getattr(config, "alibi", False)


@torch.no_grad()
def reads_packed_alike(prepared: nn.Module, vocabulary: int, packer: Packer) -> bool:
    """Whether a model's output for some answers is the same alone and packed into rows."""
    # No two tokens are alike: otherwise attention to the wrong ones would not show.
    ids = [7 * i % vocabulary for i in range(40)]
    prompts = [ids[:16], ids[:16], ids[:8], ids[3:9]]
    others = [ids[20:32], ids[8:12], ids[2:6]]

    def read(first_answer: list[int], packer: Packer) -> torch.Tensor:
        output = prepared(packer.make_batch(prompts, [first_answer, *others]))
        if isinstance(output, dict):
            return torch.stack(list(output.values()), 1)
        return output

    with evaluation_mode(prepared):
        alone = read(ids[16:24], Packer(packer.device))
        packed = read(ids[16:24], packer)
        with_another = read(ids[32:], packer)
    if (alone - packed).abs().mean() > 0.01 * (1 + alone.abs().max()):
        return False
    # Another first answer must not change the others at all: what leaks may be small.
    return packed[1:].equal(with_another[1:])


@contextlib.contextmanager
def evaluation_mode(model: nn.Module):
    """Puts all modules into evaluation mode inside the block, and afterwards back as they were."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
