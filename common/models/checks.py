"""Whether an architecture is read rightly."""

import sys

import torch
from torch import nn
from transformers import PreTrainedModel

from common.models import packing


@torch.no_grad()
def check_logprobs(prepared: nn.Module, ids: list[int], device, model_name: str) -> None:
    """Compares our log-probs with those of the architecture's own logits on one short row, inside the prepared forward. Leaves the
    model in evaluation mode.

    Raises:
        SystemExit: the architecture does something to its logits that `LogProbModel` does not know.
    """
    ids = (ids * 2)[:16]  # a prompt may be one token, which nothing predicts
    prepared.eval()
    scores = prepared(packing.make_batch([ids[:1]], [ids[1:]], False, device), check=True)
    # The median: in half precision a single logit may be rounded the other way, by more than any bound would allow.
    worst = (scores["logps"] - scores["own_logps"]).abs().median().item()
    if not worst <= 0.01 * (1 + scores["own_logps"].abs().max().item()):
        sys.exit(
            f"{model_name}: its head's log-probs differ from its own logits' by {worst:.3g}: this architecture is not supported yet"
        )


@torch.no_grad()
def can_pack(models: list[nn.Module], longest: int, device) -> bool:
    """Whether all models read several answers in a row as they read each alone (see `lay_out`): not where attention, positions or what
    passes from token to token are of another kind. Leaves them in evaluation mode. All ranks must call it.

    Args:
        models: prepared ones, that give scores or log-probs.
        longest: tokens of the longest row.
    """
    for prepared in models:
        for config in (
            module.config.get_text_config()
            for module in prepared.modules()
            if isinstance(module, PreTrainedModel)
        ):
            window = min(
                getattr(config, name, None) or longest
                for name in ("sliding_window", "attention_chunk_size")
            )
            if (
                config._attn_implementation != "sdpa"
                or window < longest
                or getattr(config, "alibi", False)
            ):
                return False
        prepared.eval()
        ids = [
            7 * i % config.vocab_size for i in range(40)
        ]  # no two alike: else attention to the wrong ones would not show
        prompts, answers = (
            [ids[:16], ids[:16], ids[:8], ids[3:9]],
            [ids[20:32], ids[8:12], ids[2:6]],
        )
        ways = (False, ids[16:24]), (True, ids[16:24]), (True, ids[32:])
        found = [
            prepared(packing.make_batch(prompts, [first, *answers], pack, device))
            for pack, first in ways
        ]
        alone, packed, other = (
            torch.stack(list(scores.values()), 1) if isinstance(scores, dict) else scores
            for scores in found
        )
        # Another first answer changes nothing of the second, not in the last digit: what leaks may be small.
        if (alone - packed).abs().mean() > 0.01 * (1 + alone.abs().max()) or not packed[1:].equal(
            other[1:]
        ):
            return False
    return True
