"""Whether a model is interpreted correctly: log-probs, long rows, several answers in one row."""

import contextlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common import print_once
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


@torch.no_grad()
def check_logprobs(accelerator: Accelerator, model: nn.Module, ids: list[int]) -> None:
    """Compares our log-probs with those of the architecture's own logits, on one short row.

    All processes must call it.

    Args:
        model: a `LogProbModel`, prepared.
        ids: some tokens of the data, at least one.

    Raises:
        SystemExit: the architecture does something to its logits that `LogProbModel` does not know,
            or weights are not finite.
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
    tolerance = 1e-5 if output["is_fp32"].max() else 1e-2
    if not typical <= tolerance * (1 + largest):  # also where it is not a number
        refuse_not_finite(model, embeddings=True)
        whole = models_inside([model])[0]
        sys.exit(
            f"{whole.config.name_or_path}: its head's log-probs differ from its own logits' by "
            f"{typical:.3g}: this architecture is not supported yet"
        )


def refuse_not_finite(prepared: nn.Module, embeddings: bool = False) -> None:
    """Refuses models with weights that are NaN or infinite. All processes must call it.

    Args:
        embeddings: whether those of embeddings count. They harm only data rows with their tokens,
            which are named when they are read.

    Raises:
        SystemExit: naming the model and the parameter.
    """
    for model in models_inside([prepared]):
        own = []
        tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
        for name, parameter in model.named_parameters():
            if not embeddings and any(parameter is table for table in tables):
                continue
            part = getattr(parameter, "ds_tensor", parameter.detach())  # ZeRO-3's own part
            if not getattr(part, "_local_tensor", part).isfinite().all():  # FSDP2's own part
                own.append(name)
        names = list(dict.fromkeys(gather_object(own)))
        if names:
            others = f", nor are {len(names) - 1} other parameters" if names[1:] else ""
            sys.exit(
                f"{model.config.name_or_path}: {names[0]} is not finite{others}: the model's file "
                "holds NaN or infinite weights"
            )


def check_positions(models: list[nn.Module], max_length: int) -> None:
    """Refuses rows that are longer than a model's table of positions.

    Args:
        models: prepared ones, or not.
        max_length: tokens of the longest row.

    Raises:
        SystemExit: a model has a table, and it is shorter.
    """
    for model in models_inside(models):
        limit = architecture.positions_of(model)
        if limit is not None and max_length > limit:
            sys.exit(
                f"--max_length {max_length}: {model.config.name_or_path!r} has a table of "
                f"{limit} positions and cannot read longer rows: give --max_length {limit}"
            )


def models_inside(models: list[nn.Module]) -> list[PreTrainedModel]:
    """Returns the Hugging Face models in some modules; PPO's module holds two."""
    return [inside for model in models for inside in architecture.whole_models(model).values()]


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
        models: all that will read the rows, prepared; their output is scores or log-probs. None
            stands for none.
        max_length: tokens of the longest row.
        share: whether prompts and rows are shared, if all models allow it, see `can_pack`.
        varlen: rows are packed for flash attention, see `Packer`.

    Raises:
        SystemExit: see `check_positions`.
    """
    readers = [model for model in models if model is not None]
    check_positions(readers, max_length)
    if not share or not can_pack(accelerator, readers, max_length, varlen):
        return Packer(accelerator.device)
    return Packer(
        accelerator.device,
        share=True,
        varlen=varlen,
        attention_equals_rest=architecture.attention_equals_rest(models_inside(readers)),
    )


def can_pack(
    accelerator: Accelerator, models: list[nn.Module], max_length: int, varlen: bool = False
) -> bool:
    """Whether all models read several answers in one row as they read each alone.

    They do not where attention or positions are of another kind than usual, or where something
    besides attention carries information between tokens (recurrent layers). If the attention was
    chosen by the user, the run prints a note. All processes must call it.

    Args:
        models, max_length, varlen: see `make_packer`.
    """
    packer = Packer(accelerator.device, share=True, varlen=varlen)
    for prepared in models:
        # Those of whole models: the parts of one have other configs, such as a vision tower's.
        configs = [model.config.get_text_config() for model in models_inside([prepared])]
        if not varlen:
            note_attention_without_mask(configs)
        if not all(attends_to_whole_rows(config, max_length, varlen) for config in configs):
            return False
        if not reads_packed_alike(prepared, configs, packer):
            return False
    return True


def note_attention_without_mask(configs: list[PreTrainedConfig]) -> None:
    """Prints a note where the user chose an attention that keeps answers in rows of their own."""
    for kind in {config._attn_implementation for config in configs} - {"sdpa"}:
        print_once(
            f"NOTE: with --attn_implementation {kind} each answer has a row of its own: "
            "only sdpa is given a mask, by which a row can hold several"
        )


def attends_to_whole_rows(config: PreTrainedConfig, longest: int, varlen: bool) -> bool:
    """Whether attention reaches over a whole row, and takes a mask and positions as usual.

    Args:
        longest: tokens of the longest row.
        varlen: attention takes the lengths of sequences instead of a mask.
    """
    kind = config._attn_implementation
    takes_rows = architecture.uses_varlen(kind) if varlen else kind == "sdpa"
    windows = [
        getattr(config, name, None) or longest
        for name in ("sliding_window", "attention_chunk_size", "index_topk")
    ]
    return takes_rows and min(windows) >= longest and not getattr(config, "alibi", False)


@torch.no_grad()
def reads_packed_alike(
    prepared: nn.Module, configs: list[PreTrainedConfig], packer: Packer
) -> bool:
    """Whether a model's output for some answers is the same alone and packed into rows.

    Args:
        configs: of the Hugging Face models inside.
    """
    sizes = [config.vocab_size for config in configs]
    sizes += [part.vocabulary for part in prepared.modules() if isinstance(part, LogProbModel)]
    # No two tokens are alike: otherwise attention to the wrong ones would not show.
    ids = [7 * i % min(sizes) for i in range(40)]
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
