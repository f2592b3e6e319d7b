"""Whether a model is read rightly: its own log-probs, long rows, several answers in one row."""

import contextlib
import sys

import torch
from torch import nn

from common.models import architecture, load, packing


@torch.no_grad()
def check_logprobs(prepared: nn.Module, ids: list[int], device, model_name: str) -> None:
    """Compares our log-probs with those of the architecture's own logits, on one short row.

    All processes must call it.

    Args:
        prepared: what `accelerator.prepare` returned for a `LogProbModel`.
        ids: some tokens of the data, at least one.

    Raises:
        SystemExit: the architecture does something to its logits that `LogProbModel` does not know.
    """
    row = (ids * 2)[:16]  # twice, because ids may be one token, which nothing predicts
    batch = packing.make_batch([row[:1]], [row[1:]], False, device)
    with evaluation_mode(prepared):
        output = prepared(batch, check=True)
    differences = (output["logps"] - output["own_logps"]).abs()
    # The median, because half precision may round a single logit the other way, by any amount, and
    # a router near a tie may choose another expert.
    typical = differences.median().item()
    largest = output["own_logps"].abs().max().item()
    tolerance = 1e-5 if output["is_fp32"].max() else 1e-2
    if not typical <= tolerance * (1 + largest):  # also where it is not a number
        sys.exit(
            f"{model_name}: its head's log-probs differ from its own logits' by {typical:.3g}: "
            "this architecture is not supported yet"
        )


def check_positions(models: list[nn.Module], max_length: int) -> None:
    """Refuses rows that are longer than a model's table of positions.

    Args:
        models: prepared ones, or not.
        max_length: tokens of the longest row.

    Raises:
        SystemExit: a model has a table, and it is shorter.
    """
    for prepared in models:
        for model in architecture.whole_models(prepared).values():
            limit = architecture.positions_of(model)
            if limit is not None and max_length > limit:
                sys.exit(
                    f"--max_length {max_length}: {model.config.name_or_path!r} has a table of "
                    f"{limit} positions and cannot read longer rows: give --max_length {limit}"
                )


@torch.no_grad()
def can_pack(models: list[nn.Module], longest: int, device, by_lengths: bool = False) -> bool:
    """Whether all models read several answers in one row as they read each alone.

    They do not where attention or positions are of another kind than usual, or where something
    besides attention carries information between tokens (recurrent layers). If the attention was
    chosen by the user, this says so. All processes must call it.

    `packing.make_batch` learns what sharing costs these models.

    Args:
        models: prepared ones, whose output is scores or log-probs.
        longest: tokens of the longest row.
        by_lengths: rows are packed as flash attention takes them, see `packing.make_batch`.
    """
    whole_models = []
    for prepared in models:
        # Those of whole models: the parts of one have other configs, such as a vision tower's.
        models_inside = architecture.whole_models(prepared).values()
        configs = [model.config.get_text_config() for model in models_inside]
        whole_models += models_inside
        for kind in {config._attn_implementation for config in configs} - {"sdpa"}:
            if not by_lengths:
                load.note(
                    f"NOTE: with --attn_implementation {kind} each answer has a row of its own: "
                    "only sdpa is given a mask, by which a row can hold several"
                )
        if not all(attends_to_whole_rows(config, longest, by_lengths) for config in configs):
            return False
        vocab_size = min(config.vocab_size for config in configs)
        if not reads_packed_alike(prepared, vocab_size, device, by_lengths):
            return False
    packing.costs.attention_equals_rest = architecture.attention_equals_rest(whole_models)
    return True


def attends_to_whole_rows(config, longest: int, by_lengths: bool) -> bool:
    """Whether attention reaches over a whole row, and takes a mask and positions as usual.

    Args:
        by_lengths: it is told lengths instead of a mask.
    """
    window = longest
    for name in ("sliding_window", "attention_chunk_size", "index_topk"):
        window = min(window, getattr(config, name, None) or longest)
    kind = config._attn_implementation
    is_told = architecture.takes_lengths(kind) if by_lengths else kind == "sdpa"
    return is_told and window >= longest and not getattr(config, "alibi", False)


def reads_packed_alike(
    prepared: nn.Module, vocab_size: int, device, by_lengths: bool = False
) -> bool:
    """Whether a model's output for some answers is the same alone and packed into rows."""
    # No two tokens are alike: otherwise attention to the wrong ones would not show.
    ids = [7 * i % vocab_size for i in range(40)]
    prompts = [ids[:16], ids[:16], ids[:8], ids[3:9]]
    others = [ids[20:32], ids[8:12], ids[2:6]]

    def read(first_answer: list[int], pack: bool) -> torch.Tensor:
        answers = [first_answer, *others]
        batch = packing.make_batch(prompts, answers, pack, device, by_lengths=by_lengths)
        output = prepared(batch)
        if isinstance(output, dict):
            return torch.stack(list(output.values()), 1)
        return output

    with evaluation_mode(prepared):
        alone = read(ids[16:24], pack=False)
        packed = read(ids[16:24], pack=True)
        beside_another = read(ids[32:], pack=True)
    if (alone - packed).abs().mean() > 0.01 * (1 + alone.abs().max()):
        return False
    # Another first answer must not change the others at all: what leaks may be small.
    return packed[1:].equal(beside_another[1:])


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
