"""The samples of a rollout, as models read them, and the values of their tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common import batches, checkpointable, distributed, stopping
from preference_recipes.data.messages import IMAGE_COLUMNS
from preference_recipes.models import prepare
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts.answers import decode_responses
from preference_recipes.rollouts.context import SamplingContext

# Tokens, padding counted, that a process scores at once where `--score_batch_size` is 0.
SCORED_TOKENS = 2**15


@checkpointable
@dataclass
class Samples:
    """Prompts with one response each, the same on every process.

    `loss_mask` marks the tokens of a response that the model drew. Nothing is learned from tokens
    of an environment, or of other speakers in completions of the data.
    """

    prompts: list[list[int]]  # token ids
    responses: list[list[int]]
    row_json: list[str]  # the prompt's row in the data, as a JSON text
    row_numbers: list[int]  # its number, from 1
    ended: torch.Tensor  # bool `[samples]`, whether the response ends with a stop token
    per_prompt: int = 1  # how many consecutive samples answer the same prompt
    sampler_logps: list[list[float]] = field(default_factory=list)  # see `context.Response`
    loss_mask: list[list[bool]] = field(default_factory=list)
    messages: list[list[dict]] = field(default_factory=list)  # episodes, prompt included
    images: list[list[bytes]] = field(default_factory=list)  # files, if any prompt has some
    # Values of episodes for the log, `[samples]` by tag; `select_groups` and `joined` drop them.
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if not self.loss_mask:
            self.loss_mask = [[True] * len(response) for response in self.responses]

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each prompt with its response, `[samples]`."""
        pairs = zip(self.prompts, self.responses)
        return np.array([len(prompt) + len(response) for prompt, response in pairs])

    def n_tokens(self, indices: np.ndarray) -> int:
        """Returns how many tokens these samples have, prompts and responses."""
        return int(self.lengths[indices].sum())

    @property
    def group_lengths(self) -> np.ndarray:
        """The length of the longest sample in each sample's group, `[samples]`.

        Sorted by it, the samples of a group stay side by side and can share their prompt.
        """
        return self.lengths.reshape(-1, self.per_prompt).max(1).repeat(self.per_prompt)

    def lengths_for_split(self, packer: Packer) -> np.ndarray:
        """Returns the lengths by which an update is split into micro-batches, `[samples]`."""
        return self.group_lengths if packer.share else self.lengths

    @property
    def padded_loss_mask(self) -> torch.Tensor:
        """bool `[samples, longest response]`, true where the model drew a token."""
        return pad_sequence([torch.tensor(flags) for flags in self.loss_mask], batch_first=True)

    @property
    def padded_sampler_logps(self) -> torch.Tensor:
        """fp32 `[samples, longest response]`: `sampler_logps`, zero after a response."""
        rows = [torch.tensor(logps, dtype=torch.float32) for logps in self.sampler_logps]
        return pad_sequence(rows, batch_first=True)

    def response_numbers(self, indices: list[int]) -> list[int]:
        """Returns the numbers of samples among those of the same prompt, from 1."""
        return [index % self.per_prompt + 1 for index in indices]

    def make_batch(self, indices: list[int], packer: Packer) -> dict:
        prompts = [self.prompts[index] for index in indices]
        responses = [self.responses[index] for index in indices]
        loss_mask = [self.loss_mask[index] for index in indices]
        images = [self.images[index] for index in indices] if self.images else None
        return packer.make_batch(prompts, responses, loss_mask, images)

    def collate(
        self, indices: list[int], experience: dict[str, torch.Tensor], packer: Packer
    ) -> tuple[dict, dict]:
        """Returns samples as a batch that models read, and their part of `experience`."""
        batch = self.make_batch(indices, packer)
        longest = batch["loss_mask"].shape[1]
        values = {
            name: batches.to_device(tensor[indices, :longest], packer.device)
            for name, tensor in experience.items()
        }
        return batch, values

    def scoring_batches(self, context: SamplingContext) -> Iterator[tuple[list[int], dict]]:
        """Yields this process's micro-batches: the indices of their samples, and the batches.

        A process without samples gets padding, for which no index is yielded: others wait for it.
        """
        size = context.args.score_batch_size
        max_tokens = 0 if size else SCORED_TOKENS
        for indices, sample_weights in batches.split(
            context.accelerator, np.arange(len(self)), self.group_lengths, size, max_tokens
        ):
            yield indices if sample_weights.any() else [], self.make_batch(indices, context.packer)

    @torch.no_grad()
    def compute_outputs(
        self, context: SamplingContext, names: tuple[str, ...], reference: Reference | None
    ) -> dict[str, torch.Tensor]:
        """Returns the model's outputs, each name as `old_NAME`, and with a reference `ref_logps`.

        Each is `[samples, longest response]`, zero where the model drew nothing, and the same on
        every process. Values that are not finite stop the run. All processes must call it.
        """
        all_names = [f"old_{name}" for name in names] + (["ref_logps"] if reference else [])
        if not all_names:
            return {}
        temperature = context.args.temperature
        outputs = {}  # by index: [response length, names], on the CPU
        with prepare.evaluation_mode(context.model):
            for indices, batch in self.scoring_batches(context):
                per_token = []
                if names:
                    output = context.model(batch, temperature)
                    per_token = [output[name] for name in names]
                if reference is not None:
                    per_token.append(reference.logps(batch, temperature))
                stacked = torch.stack(per_token, 2).cpu()
                for index, values, is_token in zip(indices, stacked, batch["loss_mask"].cpu()):
                    # Up to the model's last token, tokens of an environment stay in, as zeros.
                    end = int(is_token.nonzero()[-1]) + 1
                    outputs[index] = torch.where(is_token[:end, None], values[:end], 0.0)
        padded = pad_sequence(distributed.gather_by_index(outputs), batch_first=True)
        computed = dict(zip(all_names, padded.unbind(2)))
        self.check_finite(context, **computed)
        return computed

    def check_finite(self, context: SamplingContext, **values: torch.Tensor) -> None:
        """Stops the run if a value `[samples, length or 1]` is not finite, and names its data row.

        That includes the sampler's log-probs: where a logit is NaN, the drawn token is meaningless.
        """
        tensors = {**values, "sampler_logps": self.padded_sampler_logps}
        sums = sum(tensors.values())  # [samples, longest response], finite only if all parts are
        losses = stopping.Losses(self.row_numbers, sums, self.padded_loss_mask)
        stopping.check_finite(context.run, [losses], tensors)

    def select_groups(self, is_kept: torch.Tensor) -> "Samples":
        """Returns the samples of the prompts that `is_kept`, bool `[prompts]`, marks."""
        is_kept = is_kept.repeat_interleave(self.per_prompt)
        flags = is_kept.tolist()
        lists: dict[str, Any] = {
            name: list(compress(values, flags))
            for name, values in vars(self).items()
            if isinstance(values, list)
        }
        return replace(self, ended=self.ended[is_kept], statistics={}, **lists)

    @staticmethod
    def joined(parts: list["Samples"]) -> "Samples":
        """Returns the samples of all parts, one part after the other."""
        lists: dict[str, Any] = {
            name: [value for part in parts for value in getattr(part, name)]
            for name, values in vars(parts[0]).items()
            if isinstance(values, list)
        }
        ended = torch.cat([part.ended for part in parts])
        return replace(parts[0], ended=ended, statistics={}, **lists)

    def response_texts(self, tokenizer) -> list[str]:
        """Returns the text of each response; for an episode, the text of its last answer."""
        last_answers = []
        for response, is_sampled in zip(self.responses, self.loss_mask):
            # The tokens at the end that the model drew.
            n_drawn = len(list(takewhile(bool, reversed(is_sampled))))
            last_answers.append(response[len(response) - n_drawn :])
        return decode_responses(tokenizer, last_answers)

    def examples(self, tokenizer, scores, source: str) -> list[dict]:
        """Returns all prompts and responses for `samples.jsonl`; `scores` None: nothing scores."""
        examples = []
        texts = zip(tokenizer.batch_decode(self.prompts), tokenizer.batch_decode(self.responses))
        for index, (prompt, response) in enumerate(texts):
            example = {"source": source, "row": self.row_numbers[index]}
            example |= {"prompt": prompt, "response": response}
            if self.images and self.images[index]:
                columns = json.loads(self.row_json[index])
                example["images"] = next(filter(None, map(columns.get, IMAGE_COLUMNS)))
            if self.messages:
                example["messages"] = self.messages[index]
            if scores is not None:
                example["score"] = scores.total[index].item()
                # NaN, which JSON lacks, means that a function returned None.
                example["rewards"] = {
                    name: None if part[index].isnan() else part[index].item()
                    for name, part in scores.parts.items()
                }
            examples.append(example)
        return examples


def share_of_groups(accelerator, n_prompts: int, per_prompt: int) -> list[int]:
    """Returns indices of this process's samples, maybe none; those of a prompt stay together."""
    groups = np.arange(n_prompts * per_prompt).reshape(-1, per_prompt)
    share = np.array_split(groups, accelerator.num_processes)[accelerator.process_index]
    return share.flatten().tolist()


def repeat_each(values: list, times: int) -> list:
    """Returns a list in which each value is repeated `times` times in a row."""
    return [value for value in values for _ in range(times)]
