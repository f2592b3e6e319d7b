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
        prompts: `[prompts, longest prompt]`, the index of each token in the row; 0 for padding.
        answers: `[answers, longest answer]`, likewise.
        prompt_of_answer: `[answers]`.
        answer_mask: bool `[answers, 1, longest answer, longest prompt + longest answer]`, which
            keys of its prompt and of its own answer a token sees.
        slots: `[row length]`, the index of each token in the flattened `prompts` and `answers`.
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
        padded_prompts = batches.pad(prompts, -1, "cpu")
        padded_answers = batches.pad(answers, -1, "cpu")
        longest_answer = padded_answers.shape[1]
        # A kernel wants at least one key, and that of a GPU masks of a multiple of 8 keys.
        n_more = 8 - (padded_prompts.shape[1] + longest_answer) % 8
        padded_prompts = functional.pad(padded_prompts, (0, n_more), value=-1)
        sees_prompt = batches.to_device((padded_prompts >= 0)[prompt_of_answer], device)
        sees_own = torch.ones(longest_answer, longest_answer, dtype=torch.bool, device=device)
        sees = (
            sees_prompt[:, None].expand(-1, longest_answer, -1),
            sees_own.tril().expand(len(answers), -1, -1),
        )
        indices = torch.cat([padded_prompts.flatten(), padded_answers.flatten()])

        mask = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, length, length)
        mask = mask.as_subclass(SharedMask)
        mask.prompts = batches.to_device(padded_prompts.clamp(min=0), device)
        mask.answers = batches.to_device(padded_answers.clamp(min=0), device)
        mask.prompt_of_answer = batches.to_device(prompt_of_answer, device)
        mask.answer_mask = torch.cat(sees, 2)[:, None]
        mask.slots = batches.to_device(indices.argsort()[-length:], device)  # padding comes first
        return mask

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        mask = (kwargs or {}).get("attn_mask")
        if function is functional.scaled_dot_product_attention and hasattr(mask, "slots"):
            return attend(*args, **kwargs)
        result = super().__torch_function__(function, types, args, kwargs)
        if function is torch.Tensor.detach:  # ZeRO-3 detaches what a model is given
            vars(result).update(vars(args[0]))
        return result


def attend(query, key, value, attn_mask: SharedMask, is_causal=False, **kwargs) -> torch.Tensor:
    """Computes `scaled_dot_product_attention`; `query` is `[1, heads, row length, head size]`."""

    def take(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        by_token = states[0].transpose(0, 1).index_select(0, indices.flatten())
        return by_token.unflatten(0, indices.shape).transpose(1, 2)

    states = query, key, value
    prompts = [take(tensor, attn_mask.prompts) for tensor in states]
    answers = [take(tensor, attn_mask.answers) for tensor in states]
    # Not `index_select`: on a GPU its gradient would add those of several answers in any order.
    answer_keys, answer_values = (
        torch.cat([of_prompts[attn_mask.prompt_of_answer], of_answers], 2)
        for of_prompts, of_answers in zip(prompts[1:], answers[1:])
    )
    attention = functional.scaled_dot_product_attention
    outputs = (
        attention(*prompts, is_causal=True, **kwargs),
        attention(
            answers[0], answer_keys, answer_values, attn_mask=attn_mask.answer_mask, **kwargs
        ),
    )
    by_token = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return by_token.index_select(0, attn_mask.slots).transpose(0, 1)[None]
