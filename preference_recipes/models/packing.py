"""Lays out prompts and answers as the rows of tokens that a model reads.

A prompt is read once, before all its answers, where that costs no more than to read it for each.
All prompts then form one row, without padding. Positions and a mask let each answer see its prompt
and itself alone, so that it is read as if nothing else were there. Two answers, [4, 5] and [6], to
the prompt [1, 2] are laid out as:

    input_ids       1  2  4  5  6     one row, `[rows, row length]`
    position_ids    0  1  2  3  2     each answer goes on from its prompt
    attention_mask  x                 what each token sees, from the first one down; a
                    x  x              `SharedMask` stands for it and does not hold it
                    x  x  x
                    x  x  x  x
                    x  x  .  .  x     the second answer does not see the first

    targets         4  5  6           the tokens whose log-probs are wanted, answer after answer
    predictor_index 1  2  1           the index of the token that predicts each target
    last_token_index  3  4            the index of the last token of each answer
    loss_mask       x  x              which tokens of the answers are targets, padded:
                    x  .              `[answers, longest answer]`
    target_slots    0  1  2           the index of each target in the flattened `loss_mask`

Without sharing, each answer has a row of its own, after its prompt. A token's index then counts
over all rows, one row after the other. Padding is on the right and needs no mask: under causal
attention no token sees it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import batches
from preference_recipes.models import shared_attention

# The masks of a `SharedMask` have at most so many elements together.
MAX_MASK = 2**26

# A prompt with its answers, given as the answers' indices.
Group = list[int]


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.make_packer`."""

    device: torch.device  # where the batches go
    share: bool = False  # whether prompts are shared where that pays
    width: int = 512  # the hidden size of the models
    processor: Any = None  # turns the images of prompts into pixels; None: there are none
    # The tokens and the file of an image. A batch without images gets it as an extra prompt where
    # other processes would otherwise wait for this one's vision tower.
    example: tuple[list[int], bytes] | None = None

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        loss_mask: Sequence[list] | None = None,
        images: Sequence[list[bytes] | None] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads, see the module's docstring.

        Args:
            prompts: one for each answer; may be empty.
            loss_mask: whether the log-prob of each token of each answer is wanted; by default all.
                After an empty prompt the first must be false: nothing predicts that token.
            images: the image files of each answer or its prompt; their pixels become inputs, too.

        Returns:
            inputs: what a `transformers` model takes; `position_ids` and `attention_mask` only if
                prompts are shared.
            n_tokens: how many tokens the rows hold, a shared prompt once and padding not at all.
        """
        if loss_mask is None:
            loss_mask = [[True] * len(answer) for answer in answers]
        files = [tuple(image_files or ()) for image_files in images or [None] * len(answers)]
        if self.example is not None and not any(files):
            example_ids, example_file = self.example
            # It has no `loss_mask`, so `zip` leaves it out of the targets.
            prompts, answers = [*prompts, example_ids], [*answers, []]
            files.append((example_file,))
        rows = self.lay_out(prompts, answers, files)
        ids, positions, prompt_ends, starts = place_tokens(rows, prompts, answers)
        inputs = {"input_ids": batches.to_device(ids, self.device)}
        row_files = [file for row in rows for group in row for file in files[group[0]]]
        if row_files:
            from preference_recipes.data import images as pictures  # only here: text needs none

            inputs |= pictures.inputs_of(self.processor, ids, row_files, self.device)
        if len(rows) < len(answers):
            [groups] = rows
            lengths = lengths_of(groups, prompts, answers)
            inputs["position_ids"] = batches.to_device(positions, self.device)
            inputs["attention_mask"] = shared_attention.SharedMask.make(lengths, self.device)

        targets: list[int] = []
        predictor_index: list[int] = []
        last_token_index = []
        for index, (answer, flags) in enumerate(zip(answers, loss_mask)):
            if not prompts[index] and any(flags[:1]):
                raise ValueError(f"answer {index} has an empty prompt: nothing predicts its start")
            end = starts[index] + len(answer)
            predictors = [prompt_ends[index] - 1, *range(starts[index], end - 1)]
            targets += itertools.compress(answer, flags)
            predictor_index += itertools.compress(predictors, flags)
            last_token_index.append(end - 1)
        mask = batches.pad(loss_mask, False, "cpu").bool()
        # The CPU finds them: with a GPU the host would have to wait for their number.
        target_slots = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": inputs,
            "targets": batches.to_device(np.array(targets, np.int64), self.device),
            "predictor_index": batches.to_device(np.array(predictor_index, np.int64), self.device),
            "last_token_index": batches.to_device(last_token_index, self.device),
            "loss_mask": batches.to_device(mask, self.device),
            "target_slots": batches.to_device(target_slots, self.device),
            "n_tokens": sum(row_length(row, prompts, answers) for row in rows),
        }

    def lay_out(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], files: Sequence[tuple]
    ) -> list[list[Group]]:
        """Returns the groups of each row: one row if prompts are shared, else one for each answer.

        They are shared if that is wanted and pays off. Unshared rows begin with the longest.
        """
        lengths = np.array([[len(prompt), len(answer)] for prompt, answer in zip(prompts, answers)])
        longest_first = np.argsort(-lengths.sum(1), kind="stable").tolist()
        unshared = [[[index]] for index in longest_first]
        if not self.share:
            return unshared
        by_prompt: dict[tuple, Group] = {}  # and by images: different ones may have equal ids
        for index, prompt in enumerate(prompts):
            by_prompt.setdefault((tuple(prompt), files[index]), []).append(index)
        shared = [list(by_prompt.values())]
        groups = lengths_of(shared[0], prompts, answers)
        blocks = [
            [groups[index] for index in block]
            for block in shared_attention.split(groups, self.device)
        ]
        # The multiplications of a layer, divided by its width. Attention has products with keys and
        # with values. Without a mask it is causal, and skips half of them.
        shared_cost = row_length(shared[0], prompts, answers) * 12 * self.width
        shared_cost += sum(2 * shared_attention.cost(block) for block in blocks)
        longest = int(lengths.sum(1).max())
        unshared_cost = len(answers) * longest * (12 * self.width + longest)
        mask_size = sum(shared_attention.mask_size(block) for block in blocks)
        pays = shared_cost <= unshared_cost and mask_size <= MAX_MASK
        return shared if pays else unshared

    def describe(self) -> str:
        """Returns in words whether prompts are shared."""
        return "prompts are computed once" if self.share else "prompts are computed for each answer"


def lengths_of(row: list[Group], prompts: Sequence, answers: Sequence) -> list[tuple]:
    """Returns the length of each group's prompt, and those of its answers."""
    return [(len(prompts[group[0]]), [len(answers[index]) for index in group]) for group in row]


def row_length(row: list[Group], prompts: Sequence, answers: Sequence) -> int:
    """Returns the number of tokens in a row, without its padding."""
    lengths = lengths_of(row, prompts, answers)
    return sum(prompt + sum(answer_lengths) for prompt, answer_lengths in lengths)


def place_tokens(rows: list[list[Group]], prompts: Sequence, answers: Sequence) -> tuple:
    """Writes prompts and answers into their rows, one after the other.

    Returns:
        int64 `[rows, row length]`: each token's id, and its position.
        for each answer the index after its prompt, and the index of its first token.
    """
    length = max(row_length(row, prompts, answers) for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(ids)
    prompt_ends = [0] * len(answers)
    starts = [0] * len(answers)

    def write(piece: list[int], row: int, start: int, position: int) -> int:
        end = start + len(piece)
        ids[row, start:end] = piece
        positions[row, start:end] = np.arange(position, position + len(piece))
        return end

    for row, groups in enumerate(rows):
        end = 0
        for group in groups:
            prompt = prompts[group[0]]
            end = prompt_end = write(prompt, row, end, 0)
            for index in group:
                prompt_ends[index] = row * length + prompt_end
                starts[index] = row * length + end
                end = write(answers[index], row, end, len(prompt))
    return ids, positions, prompt_ends, starts
