"""Attention within a row of shared prompts: prompt by prompt, and answer by answer.

A mask of the whole row would grow with its square, and most of it would hide one answer from
another. Instead, prompts form one batch, and answers another, in which each answer attends to the
keys of its prompt and to its own. Both are padded to their longest, so prompts and answers are
divided into blocks of similar lengths. Each block is one batch of prompts and one of answers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from common import batches

# The length of a prompt, and the lengths of its answers.
Group = tuple[int, Sequence[int]]
# How many products of a query and a key take as long as one more block does. Measured on a CPU;
# estimated for a GPU and other devices, where small kernels wait for the host.
BLOCK_COST = {"cpu": 2**12, "cuda": 2**22}


def split(groups: Sequence[Group], device: "torch.device | str") -> list[list[int]]:
    """Divides groups into blocks of similar lengths. Returns the groups' indices, block by block.

    A group joins the last block if the padding costs no more than a block of its own.
    """
    block_cost = BLOCK_COST.get(torch.device(device).type, 2**22)
    blocks: list[list[int]] = []
    last_cost = 0
    for index in sorted(range(len(groups)), key=lambda index: max(groups[index][1])):
        own_cost = cost([groups[index]])
        if blocks:
            cost_together = cost([groups[other] for other in [*blocks[-1], index]])
            if cost_together <= last_cost + own_cost + block_cost:
                blocks[-1].append(index)
                last_cost = cost_together
                continue
        blocks.append([index])
        last_cost = own_cost
    return blocks


def cost(block: Sequence[Group]) -> int:
    """Returns how many products of a query and a key the attention of a block takes."""
    longest_prompt = max(prompt for prompt, _ in block)
    # Prompts have causal attention, which skips half of them. Answers have a mask and skip none.
    return len(block) * longest_prompt**2 // 2 + mask_size(block)


def mask_size(block: Sequence[Group]) -> int:
    """Returns the number of elements of a block's mask."""
    longest_prompt = max(prompt for prompt, _ in block)
    longest_answer = max(max(answers) for _, answers in block)
    n_answers = sum(len(answers) for _, answers in block)
    return n_answers * longest_answer * (longest_prompt + longest_answer)


class Block(NamedTuple):
    """Prompts and their answers that are computed at once."""

    prompt_shape: torch.Size  # `[prompts, longest prompt]`
    answer_shape: torch.Size  # `[answers, longest answer]`
    prompt_of_answer: torch.Tensor  # `[answers]`
    # bool `[answers, 1, longest answer, longest prompt + longest answer]`: which keys of its prompt
    # and of its own answer a token sees
    mask: torch.Tensor


class SharedMask(torch.Tensor):
    """The attention mask of a row of prompts, each followed by its answers.

    By itself it is `[1, 1, row length, row length]`, hides nothing and takes no memory. torch's
    attention is computed by `attend` instead, as with torch's own `CausalBias`. A model that uses
    its mask in another way has other log-probs, which `checks.can_share` finds.

    Attributes:
        blocks: a list of `Block`.
        index: where each token of their prompts and answers is in the row: block by block, prompts
            before answers, all flattened; 0 for padding.
        flat_index: `[row length]`, where each token is in `index`.
    """

    @staticmethod
    def make(groups: Sequence[Group], device: torch.device) -> "SharedMask":
        """Returns the mask of a row of these prompts and answers."""
        places = []  # where the prompt and the answers of each group are in the row
        length = 0
        for prompt_length, answer_lengths in groups:
            pieces = []
            for piece_length in (prompt_length, *answer_lengths):
                pieces.append(range(length, length + piece_length))
                length += piece_length
            places.append(pieces)
        blocks = []
        indices = []
        for block in split(groups, device):
            prompts = batches.pad([places[group][0] for group in block], -1, "cpu")
            answers = [answer for group in block for answer in places[group][1:]]
            answers = batches.pad(answers, -1, "cpu")
            # A GPU's kernel wants a multiple of 8 keys. At least one is added, because prompts may
            # be empty.
            n_more = 8 - (prompts.shape[1] + answers.shape[1]) % 8
            prompts = functional.pad(prompts, (0, n_more), value=-1)
            prompt_of_answer = [n for n, group in enumerate(block) for _ in places[group][1:]]
            sees_prompt = batches.to_device((prompts >= 0)[prompt_of_answer], device)
            blocks.append(
                Block(
                    prompts.shape,
                    answers.shape,
                    batches.to_device(prompt_of_answer, device),
                    answer_mask(sees_prompt, answers.shape[1]),
                )
            )
            indices += [prompts.flatten(), answers.flatten()]
        index = torch.cat(indices)
        mask = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, length, length)
        mask = mask.as_subclass(SharedMask)
        mask.blocks = blocks
        mask.index = batches.to_device(index.clamp(min=0), device)
        # Sorted by their place in the row; padding, -1, comes first.
        mask.flat_index = batches.to_device(index.argsort()[-length:], device)
        return mask

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        mask = (kwargs or {}).get("attn_mask")
        if function is functional.scaled_dot_product_attention and hasattr(mask, "flat_index"):
            return attend(*args, **kwargs)
        result = super().__torch_function__(function, types, args, kwargs)
        if function is torch.Tensor.detach:  # ZeRO-3 detaches what a model is given
            vars(result).update(vars(args[0]))
        return result


def answer_mask(sees_prompt: torch.Tensor, longest_answer: int) -> torch.Tensor:
    """Returns the mask of a block's answers, given which keys of its prompt each one sees."""
    sees_own = sees_prompt.new_ones(longest_answer, longest_answer).tril()
    sees = (
        sees_prompt[:, None].expand(-1, longest_answer, -1),
        sees_own.expand(len(sees_prompt), -1, -1),
    )
    return torch.cat(sees, 2)[:, None]


def attend(query, key, value, attn_mask: SharedMask, is_causal=False, **kwargs) -> torch.Tensor:
    """Computes `scaled_dot_product_attention`; `query` is `[1, heads, row length, head size]`.

    `is_causal` is not used: `attn_mask` says what each token sees.
    """
    shapes = [shape for block in attn_mask.blocks for shape in block[:2]]
    sizes = [math.prod(shape) for shape in shapes]

    def batches_of(states: torch.Tensor) -> list[torch.Tensor]:
        """Returns prompts and answers of each block in turn, `[batch, heads, longest, size]`."""
        # Only padding takes a token twice, and its gradients are zero.
        by_token = states[0].transpose(0, 1).index_select(0, attn_mask.index)
        parts = zip(by_token.split(sizes), shapes)
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in parts]

    attention = functional.scaled_dot_product_attention
    states = list(zip(*map(batches_of, (query, key, value))))
    outputs = []
    for block, prompts, answers in zip(attn_mask.blocks, states[::2], states[1::2]):
        queries, *own = answers
        # Answers have prompts in common. `index_select` is much faster on a CPU, but on a GPU it
        # adds their gradients in any order.
        of_prompts = [
            part.index_select(0, block.prompt_of_answer)
            if part.is_cpu
            else part[block.prompt_of_answer]
            for part in prompts[1:]
        ]
        keys, values = (torch.cat(parts, 2) for parts in zip(of_prompts, own))
        outputs.append(attention(*prompts, is_causal=True, **kwargs))
        outputs.append(attention(queries, keys, values, attn_mask=block.mask, **kwargs))
    by_token = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return by_token.index_select(0, attn_mask.flat_index).transpose(0, 1)[None]
