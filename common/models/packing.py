"""Answers and prompts as rows."""

from collections.abc import Sequence

import numpy as np
import torch

from common import batches


def make_batch(
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    pack: bool,
    device,
    scored: Sequence[list] | None = None,
) -> dict:
    """Answers to prompts as a model reads them. Nothing here waits for a GPU: it computes one micro-batch while the next is laid out.

    Packed, a prompt that several have in common is computed once, and a row holds several prompts where they fit beside each other:
    an answer sees its prompt and itself only, at the positions it would have alone. Else, and where that would cost more, each is a
    row of its own.

    Args:
        scored: which tokens of each answer are targets; by default all.

    Returns:
        `inputs`, what a `transformers` model takes: `input_ids` `[rows, length]` padded on the right, and, where a row holds several
        answers, `position_ids` and `attention_mask`. `mask`, which tokens are targets, `[answers, longest]`, `targets`, their ids, and
        `before`, the place of the token that predicts each, `[targets]` in the order of the mask. `last`, the place of each answer's
        last token, `[answers]`. Places are counted through the rows one after the other.
    """
    groups, rows = {}, []
    for number, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if pack and prompt else number, []).append(number)
    # A tree of pieces: their ids, the position of the first, and two numbers, the piece's own and its prompt's.
    trees = [
        [(prompts[i[0]], 0, ~i[0], ~i[0]), *((answers[n], len(prompts[n]), n, ~i[0]) for n in i)]
        for i in groups.values()
    ]
    size = lambda pieces: sum(len(piece) for piece, *_ in pieces)
    longest = max(map(size, trees))
    for tree in sorted(trees, key=size, reverse=True):
        row = next((row for row in rows if pack and size(row) + size(tree) <= longest), None)
        if row is None:
            rows.append(row := [])
        row += tree
    alone = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    # The cost of rows: attention grows with the square of the length, and is as much as all else at some thousand tokens; under a mask
    # nothing of the square is left out.
    if pack and len(rows) * longest * (2 * longest + 4096) > len(answers) * alone * (alone + 4096):
        return make_batch(prompts, answers, False, device, scored)
    ids, positions, owns, parents = (
        np.full(len(rows) * longest, fill) for fill in (0, 0, len(answers), len(answers))
    )
    before, last = [[]] * len(answers), [0] * len(answers)
    for number, row in enumerate(rows):
        end = number * longest
        for piece, position, own, parent in row:
            start, end = end, end + len(piece)
            ids[start:end], positions[start:end] = piece, range(position, position + len(piece))
            owns[start:end], parents[start:end] = own, parent
            if own < 0:
                end_of_prompt = max(end - 1, 0)
            else:
                before[own], last[own] = [end_of_prompt, *range(start, end - 1)], end - 1
    scored = [[True] * len(answer) for answer in answers] if scored is None else scored
    chosen = lambda parts: [
        one for part, flags in zip(parts, scored) for one, flag in zip(part, flags) if flag
    ]
    send = lambda array: torch.as_tensor(array).to(device, non_blocking=True)
    of_rows = lambda array: send(array).view(len(rows), longest)
    inputs, mask = {"input_ids": of_rows(ids)}, batches.pad(scored, False, device).bool()
    if len(rows) < len(answers):
        own, parent = (of_rows(array)[:, None, :, None] for array in (owns, parents))
        inputs |= {
            "position_ids": of_rows(positions),
            "attention_mask": ((own.mT == own) | (own.mT == parent)).tril(),
        }
    return {
        "inputs": inputs,
        "mask": mask,
        "targets": send(chosen(answers)),
        "before": send(chosen(before)),
        "last": send(last),
    }
