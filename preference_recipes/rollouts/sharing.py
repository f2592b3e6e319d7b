"""Attention where rows share prompts: a prompt's keys and values are kept and read once for all.

The newest token of a row attends to its prompt and to the row's own tokens. The queries of all rows
of a prompt are multiplied by its keys at once, and one softmax covers both parts.
"""

import copy
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AttentionInterface

from common import batches, patched
from preference_recipes.models import onednn

# Keys and values of a layer that sharing must save: it takes twenty more operations for each layer
# and token. Measured on a CPU, estimated for a GPU; other devices are taken for one.
LEAST_SAVED = {"cpu": 2**20, "cuda": 2**26}


class NotPlain(Exception):
    """A model's attention is more than what `attend` computes."""


def share(batch, prompt_of_row: list[int]) -> "tuple | None":
    """Returns a `generation.Batch` without a new token yet, and the prompts that its rows share.

    The cache of `batch` has each prompt once without its last token, and stays as it is. None:
    sharing does not pay, or the attention is not known to be plain, or keys are in half precision,
    whose products would be rounded too early.
    """
    keys = batch.cache.layers[0].keys  # [prompts, heads, tokens, head size]
    n_saved = 2 * keys[0].numel() * (len(prompt_of_row) - len(keys))
    is_plain = batch.context.unwrapped.model._supports_attention_backend
    if (
        not is_plain
        or keys.dtype != torch.float32
        or n_saved < LEAST_SAVED.get(keys.device.type, 2**26)
    ):
        return None
    cache = copy.copy(batch.cache)
    cache.layers = [*cache.layers]
    n_before = batch.padding - keys.shape[2]  # negative: so many tokens come before the row's own
    rows = dataclasses.replace(batch, ids=batch.ids[:, -1:], padding=n_before, cache=cache)
    return rows, SharedPrompts(batch, np.array(prompt_of_row))


class SharedPrompts:
    """Which rows have which prompt.

    Attributes:
        prompt_of_row: `[rows]`, the number of each row's prompt.
        rows: `[prompts, largest group]`, the rows of each prompt, and row 0 where it has fewer.
        places: `[rows]`, where each row is in the flattened `rows`.
        mask: bool `[prompts, 1, 1, tokens]`, false for padding; None: there is none.
        were_read: whether a layer has attended to them. If none does, the model does not ask.
    """

    were_read = False

    def __init__(self, batch, prompt_of_row: np.ndarray):
        self.device = batch.ids.device
        _, first_rows = np.unique(prompt_of_row, return_index=True)
        is_real = np.arange(batch.ids.shape[1] - 1) >= batch.padding[first_rows, None]
        self.mask = None if is_real.all() else batches.send(is_real[:, None, None], self.device)
        self.arrange(prompt_of_row)

    def arrange(self, prompt_of_row: np.ndarray) -> None:
        self.prompt_of_row = prompt_of_row
        groups = [np.flatnonzero(prompt_of_row == n) for n in range(prompt_of_row.max() + 1)]
        rows = batches.pad(groups, -1, "cpu")
        self.rows = batches.send(rows.clamp(min=0), self.device)
        self.places = batches.send(rows.flatten().argsort()[-len(prompt_of_row) :], self.device)

    def keep(self, rows: list[int], layers: list) -> None:
        """Drops all other rows, and the keys and values of prompts that none is left of."""
        kept, prompt_of_row = np.unique(self.prompt_of_row[rows], return_inverse=True)
        if len(kept) < len(self.rows):
            index = batches.send(kept, self.device)
            self.mask = None if self.mask is None else self.mask[index]
            for layer in layers:
                layer.prompt_keys = layer.prompt_keys[index]
                layer.prompt_values = layer.prompt_values[index]
        self.arrange(prompt_of_row)

    def attend(self, queries: torch.Tensor, layer) -> Iterator[torch.Tensor]:
        """Yields what `weighted` returns for queries `[rows, heads of keys, queries, size]`."""
        self.were_read = True
        by_prompt = queries[self.rows].transpose(1, 2).flatten(2, 3)
        for part in weighted(by_prompt @ layer.prompt_keys, layer.prompt_values, self.mask):
            by_group = part.unflatten(2, (self.rows.shape[1], -1)).transpose(1, 2)
            yield by_group.flatten(0, 1)[self.places]


def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
    """Computes the attention of a model of transformers; see `AttentionInterface`.

    Args:
        query: `[rows, heads, 1, head size]`.
        key, value: those of a row's own tokens, from `decoding.FixedLayer.update`.
    """
    layer = getattr(key, "layer", None)
    if layer is None or attention_mask is not None or position_bias is not None:
        raise NotPlain
    step = layer.step
    mask = step.mask[: step.rows, ..., : step.visible] if step.is_recorded else None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        # Heads that share keys are side by side.
        queries = (query.to(key.dtype) * scaling).reshape(*key.shape[:2], -1, key.shape[3])
        prompt_output, prompt_total = step.prompts.attend(queries, layer)
        # oneDNN takes twice as long as MKL for these products, which are small.
        with patched((torch.backends.mkldnn.matmul, "fp32_precision", onednn.MKL)):
            output, total = weighted(queries @ key.transpose(2, 3), value.to(key.dtype), mask)
        output = output.lerp(prompt_output, torch.sigmoid(prompt_total - total))
    return output.flatten(1, 2)[:, None], None


def weighted(scores, values, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values weighted by the softmax of scores `[..., queries, keys]`.

    And the log of the sum of the scores' exponentials, `[..., queries, 1]`.
    """
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    # The largest weight is the exponential of its score, divided by that sum.
    total = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights @ values, total


# The name by which a model's config chooses it.
ATTENTION = "shared_prompts"
AttentionInterface.register(ATTENTION, attend)
