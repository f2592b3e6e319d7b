"""Attention where rows share prompts: a prompt's keys and values are stored and read only once.

The newest token of a row attends to its prompt and to the row's own tokens. The queries of all rows
with the same prompt are multiplied by its keys at once, and one softmax covers both parts.
"""

import copy
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AttentionInterface

from common import batches, patched
from preference_recipes.models import onednn

# Sharing must save at least so many elements of a layer's keys and values, because it takes twenty
# more operations per layer and token. Measured on a CPU; estimated for a GPU and other devices.
LEAST_SAVED = {"cpu": 2**20, "cuda": 2**26}


class CannotShare(Exception):
    """Sharing would not pay off, or a model's attention does more than `attend` computes."""


def share(batch, prompt_of_row: list[int]) -> tuple:
    """Returns a `generation.Batch` without a new token yet, and the prompts that its rows share.

    The cache of `batch` has each prompt once, without its last token, and is not changed. Raises
    `CannotShare`, also where keys are in half precision: products would be rounded too early.
    """
    keys = batch.cache.layers[0].keys  # [prompts, heads, tokens, head size]
    n_saved = 2 * keys[0].numel() * (len(prompt_of_row) - len(keys))
    is_plain = batch.context.unwrapped.model._supports_attention_backend
    if (
        not is_plain
        or keys.dtype != torch.float32
        or n_saved < LEAST_SAVED.get(keys.device.type, 2**26)
    ):
        raise CannotShare
    cache = copy.copy(batch.cache)
    cache.layers = [*cache.layers]
    n_before = batch.padding - keys.shape[2]  # negative: minus the tokens before the row's own
    rows = dataclasses.replace(batch, ids=batch.ids[:, -1:], padding=n_before, cache=cache)
    return rows, SharedPrompts(batch, np.array(prompt_of_row))


class SharedPrompts:
    """Maps rows to the prompts that they share.

    Attributes:
        prompt_of_row: `[rows]`, the index of each row's prompt.
        rows: `[prompts, largest group]`, the rows of each prompt, and row 0 where it has fewer.
        slots: `[rows]`, the index of each row in the flattened `rows`.
        mask: bool `[prompts, 1, 1, tokens]`, false for padding; None: there is none.
        were_read: whether a layer has attended to them. If none has, the model ignores `attend`.
    """

    were_read = False

    def __init__(self, batch, prompt_of_row: np.ndarray):
        self.device = batch.ids.device
        _, first_rows = np.unique(prompt_of_row, return_index=True)
        is_real = np.arange(batch.ids.shape[1] - 1) >= batch.padding[first_rows, None]
        mask = is_real[:, None, None]
        self.mask = None if mask.all() else batches.to_device(mask, self.device)
        self.arrange(prompt_of_row)

    def arrange(self, prompt_of_row: np.ndarray) -> None:
        self.prompt_of_row = prompt_of_row
        groups = [np.flatnonzero(prompt_of_row == n) for n in range(prompt_of_row.max() + 1)]
        rows = batches.pad(groups, -1, "cpu")
        self.rows = batches.to_device(rows.clamp(min=0), self.device)
        self.slots = batches.to_device(rows.flatten().argsort()[-len(prompt_of_row) :], self.device)

    def keep(self, rows: list[int], layers: list) -> None:
        """Drops all other rows, and the keys and values of prompts without any row left."""
        kept, prompt_of_row = np.unique(self.prompt_of_row[rows], return_inverse=True)
        if len(kept) < len(self.rows):
            index = batches.to_device(kept, self.device)
            self.mask = None if self.mask is None else self.mask[index]
            for layer in layers:
                layer.prompt_keys = layer.prompt_keys[index]
                layer.prompt_values = layer.prompt_values[index]
        self.arrange(prompt_of_row)

    def attend(self, queries: torch.Tensor, layer) -> Iterator[torch.Tensor]:
        """Yields the results of `attend_part` for queries `[rows, key heads, queries, size]`."""
        self.were_read = True
        by_prompt = queries[self.rows].transpose(1, 2).flatten(2, 3)
        for part in attend_part(by_prompt @ layer.prompt_keys, layer.prompt_values, self.mask):
            by_group = part.unflatten(2, (self.rows.shape[1], -1)).transpose(1, 2)
            yield by_group.flatten(0, 1).index_select(0, self.slots)


def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
    """Computes the attention of a model of transformers; see `AttentionInterface`.

    Args:
        query: `[rows, heads, 1, head size]`.
        key, value: of a row's own tokens, from `decoding.FixedLayer.update`.
    """
    layer = getattr(key, "layer", None)
    if layer is None or attention_mask is not None or position_bias is not None:
        raise CannotShare
    step = layer.step
    mask = step.mask[: step.rows, ..., : step.visible] if step.is_recorded else None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        # Heads that share keys are side by side.
        queries = (query.to(key.dtype) * scaling).reshape(*key.shape[:2], -1, key.shape[3])
        prompt_output, prompt_total = step.prompts.attend(queries, layer)
        # oneDNN takes twice as long as MKL for these small products.
        with patched((torch.backends.mkldnn.matmul, "fp32_precision", onednn.MKL)):
            output, total = attend_part(queries @ key.transpose(2, 3), value.to(key.dtype), mask)
        output = output.lerp(prompt_output, torch.sigmoid(prompt_total - total))
    return output.flatten(1, 2)[:, None], None


def attend_part(scores, values, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `softmax(scores) @ values`, and the scores' logsumexp `[..., queries, 1]`."""
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    # The largest weight is the exponential of its score, divided by the sum of all exponentials.
    total = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights @ values, total


# The name that selects this attention in a model's config.
ATTENTION = "shared_prompts"
AttentionInterface.register(ATTENTION, attend)
