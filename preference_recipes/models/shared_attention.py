"""Attention within a row of shared prompts: prompt by prompt, and answer by answer.

A mask of the whole row would grow with its square, and most of it would hide one answer from
another. Instead, all prompts are one batch, and all answers another, in which each answer attends
to the keys of its prompt and to its own.
"""

import torch
from torch.nn import functional

from common import batches


class SharedMask(torch.Tensor):
    """The attention mask of a row of prompts, each followed by its answers.

    By itself it is `[1, 1, row length, row length]`, hides nothing and takes no memory. torch's
    attention is computed by `attend` instead, as with torch's own `CausalBias`. A model that uses
    its mask in another way has other log-probs, which `checks.can_share` finds.

    Attributes:
        prompt_index: `[prompts, longest prompt]`, where each token is in the row; 0 for padding.
        answer_index: `[answers, longest answer]`, likewise.
        prompt_of_answer: `[answers]`.
        answer_mask: bool `[answers, 1, longest answer, longest prompt + longest answer]`, which
            keys of its prompt and of its own answer a token sees.
        flat_index: `[row length]`, where each token is in the flattened `prompt_index` and, after
            it, `answer_index`.
    """

    @staticmethod
    def make(groups: list[tuple[int, list[int]]], device: torch.device) -> "SharedMask":
        """Returns the mask of prompts and answers, given the length of each prompt and answer."""
        prompts, answers, prompt_of_answer = [], [], []
        length = 0
        for prompt_length, answer_lengths in groups:
            prompts.append(range(length, length + prompt_length))
            length += prompt_length
            for answer_length in answer_lengths:
                answers.append(range(length, length + answer_length))
                prompt_of_answer.append(len(prompts) - 1)
                length += answer_length
        prompt_index = batches.pad(prompts, -1, "cpu")
        answer_index = batches.pad(answers, -1, "cpu")
        longest_answer = answer_index.shape[1]
        # A GPU's kernel wants a multiple of 8 keys. At least one is added: prompts may be empty.
        n_more = 8 - (prompt_index.shape[1] + longest_answer) % 8
        prompt_index = functional.pad(prompt_index, (0, n_more), value=-1)
        sees_prompt = batches.to_device((prompt_index >= 0)[prompt_of_answer], device)
        sees_own = torch.ones(longest_answer, longest_answer, dtype=torch.bool, device=device)
        sees = (
            sees_prompt[:, None].expand(-1, longest_answer, -1),
            sees_own.tril().expand(len(answers), -1, -1),
        )
        # Sorted by their place in the row; padding, -1, comes first.
        flat_index = torch.cat([prompt_index.flatten(), answer_index.flatten()]).argsort()[-length:]

        mask = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, length, length)
        mask = mask.as_subclass(SharedMask)
        mask.prompt_index = batches.to_device(prompt_index.clamp(min=0), device)
        mask.answer_index = batches.to_device(answer_index.clamp(min=0), device)
        mask.prompt_of_answer = batches.to_device(prompt_of_answer, device)
        mask.answer_mask = torch.cat(sees, 2)[:, None]
        mask.flat_index = batches.to_device(flat_index, device)
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


def attend(query, key, value, attn_mask: SharedMask, is_causal=False, **kwargs) -> torch.Tensor:
    """Computes `scaled_dot_product_attention`; `query` is `[1, heads, row length, head size]`.

    `is_causal` is not used: `attn_mask` says what each token sees.
    """

    def take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        # Only padding takes a token twice, and its gradients are zero.
        by_token = states[0].transpose(0, 1).index_select(0, index.flatten())
        return by_token.unflatten(0, index.shape).transpose(1, 2)

    prompts = [take(states, attn_mask.prompt_index) for states in (query, key, value)]
    queries, *own = [take(states, attn_mask.answer_index) for states in (query, key, value)]
    # Answers have prompts in common. On a GPU `index_select` adds their gradients in any order; on a
    # CPU it is much faster.
    of_answer = attn_mask.prompt_of_answer
    of_prompts = [
        states.index_select(0, of_answer) if states.is_cpu else states[of_answer]
        for states in prompts[1:]
    ]
    keys, values = (torch.cat(parts, 2) for parts in zip(of_prompts, own))
    attention = functional.scaled_dot_product_attention
    outputs = (
        attention(*prompts, is_causal=True, **kwargs),
        attention(queries, keys, values, attn_mask=attn_mask.answer_mask, **kwargs),
    )
    by_token = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return by_token.index_select(0, attn_mask.flat_index).transpose(0, 1)[None]
