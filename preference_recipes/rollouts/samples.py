"""The samples of a rollout, as models read them, and the values of their tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from common import batches, distributed, guards
from common.checkpoint import carried
from preference_recipes.data.chat import decode_answers
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts.sampler import Sampler

# What a process scores at once where `--score_batch_size` is 0, in tokens, padding counted. Without
# gradients a token takes about a third of the memory that it takes in training.
SCORED_TOKENS = 2**15
# The tag of the share of episodes whose environment failed.
FAILED = "environment/failed"


class Response(NamedTuple):
    """One generated response.

    Attributes:
        ids: its tokens, up to and including its first stop token.
        logps: the log-prob of each token under the distribution that it was drawn from, at the
            temperature of sampling; empty if it was generated greedily.
    """

    ids: list[int]
    logps: list[float]


@carried
@dataclass
class Samples:
    """Prompts with one response each, the same on every process.

    A prompt with several responses occurs once for each of them, side by side. A sample's row is
    its place here: 0, 1, 2 ...

    Attributes:
        prompts, responses: token ids.
        row_texts: the prompt's row in the data, as a JSON text.
        data_rows: the number of that row, from 1.
        ended: bool `[samples]`, whether the response ends with a stop token.
        per_prompt: how many samples, side by side, answer the same prompt.
        sampler_logps: the log-prob of each token of each response, as the sampler computed it when
            it drew the token; an empty list for a response that was generated greedily.
        is_sampled: of each token of each response, whether the model drew it. In episodes the
            others come from an environment, in completions of the data from whoever spoke besides
            the assistant, and nothing is learned from them. An empty list: all.
        messages: of episodes, each conversation, prompt included.
        of_episodes: of episodes, `[samples]` by tag, for the log.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    row_texts: list[str]
    data_rows: list[int]
    ended: torch.Tensor
    per_prompt: int = 1
    sampler_logps: list[list[float]] = field(default_factory=list)
    is_sampled: list[list[bool]] = field(default_factory=list)
    messages: list[list[dict]] = field(default_factory=list)
    of_episodes: dict[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def failed(self) -> torch.Tensor:
        """bool `[samples]`, where an environment failed: not scored, not trained on, in no mean."""
        failed = self.of_episodes.get(FAILED)
        return torch.zeros(len(self), dtype=torch.bool) if failed is None else failed.bool()

    def nan_where_failed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values `[samples]` in fp32, with NaN where `failed`: NaN counts in no mean."""
        return values.float().masked_fill(self.failed, torch.nan)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each prompt with its response, `[samples]`."""
        pairs = zip(self.prompts, self.responses)
        return np.array([len(prompt) + len(response) for prompt, response in pairs])

    @property
    def group_lengths(self) -> np.ndarray:
        """The length of the longest sample in each sample's group, `[samples]`.

        Sorted by it, the samples of a group stay side by side and can share their prompt.
        """
        return self.lengths.reshape(-1, self.per_prompt).max(1).repeat(self.per_prompt)

    def lengths_for_split(self, packer: Packer) -> np.ndarray:
        """Returns the lengths by which `batches.split_update` sorts the samples, `[samples]`.

        Where prompts can be shared, each sample gets the length of its group's longest one. So a
        group stays side by side, and most of it shares a micro-batch. `--micro_train_tokens` then
        counts a group's shorter samples as that long, too.
        """
        return self.group_lengths if packer.share else self.lengths

    @property
    def mask(self) -> torch.Tensor:
        """bool `[samples, longest response]`, where a response has a token that the model drew."""
        if self.is_sampled:
            rows = [torch.tensor(is_sampled) for is_sampled in self.is_sampled]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([[len(response)] for response in self.responses])
        return torch.arange(lengths.max()) < lengths

    @property
    def padded_sampler_logps(self) -> torch.Tensor:
        """fp32 `[samples, longest response]`: `sampler_logps`, zero after a response."""
        rows = [torch.tensor(logps, dtype=torch.float32) for logps in self.sampler_logps]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def make_batch(self, rows: list[int], packer: Packer) -> dict:
        """Returns some of the samples as models read them."""
        prompts = [self.prompts[row] for row in rows]
        responses = [self.responses[row] for row in rows]
        return packer.make_batch(prompts, responses, self.targets_of(rows))

    def targets_of(self, rows: Sequence[int]) -> list[list[bool]]:
        """Returns which tokens of some responses the model drew."""
        if self.is_sampled:
            return [self.is_sampled[row] for row in rows]
        return [[True] * len(self.responses[row]) for row in rows]

    def collate(
        self, rows: list[int], tokens: dict[str, torch.Tensor], packer: Packer
    ) -> tuple[dict, dict]:
        """Returns some of the samples as models read them, and values of their response tokens.

        Args:
            tokens: values of all samples by name, `[samples, longest response]` or `[samples, 1]`.
        """
        batch = self.make_batch(rows, packer)
        longest = batch["mask"].shape[1]
        values = {
            name: batches.send(tensor[rows, :longest], packer.device)
            for name, tensor in tokens.items()
        }
        return batch, values

    def scoring_batches(self, sampler: Sampler, packer: Packer) -> Iterator[tuple[list[int], dict]]:
        """Yields this process's micro-batches: the rows of their samples, and what models read.

        The samples of all processes together are all samples, each once. A process that has none
        still gets a batch, of a padding row, because the others wait for its forward pass. Then
        `rows` is an empty list, and nothing of that pass is kept.

        A micro-batch has `--score_batch_size` samples, or as many as fit into `SCORED_TOKENS`.
        """
        batch_size = sampler.args.score_batch_size
        micro_batches = batches.split(
            sampler.accelerator,
            np.arange(len(self)),
            self.group_lengths,
            batch_size,
            max_tokens=0 if batch_size else SCORED_TOKENS,
        )
        for micro_batch in micro_batches:
            is_real = micro_batch.weights.any()
            rows = micro_batch.rows if is_real else []
            yield rows, self.make_batch(micro_batch.rows, packer)

    def whole_groups(self, accelerator) -> list[int]:
        """Returns the rows of this process's samples, see `share_of_groups`."""
        return share_of_groups(accelerator, len(self) // self.per_prompt, self.per_prompt)

    def check_finite(self, sampler: Sampler, **values: torch.Tensor) -> None:
        """Stops the run if a value of a sample is not finite, and names its data row.

        The sampler's log-probs count, too: where a logit is NaN, the drawn token means nothing.

        Args:
            values: by name, `[samples, longest response]` or `[samples, 1]`.

        Raises:
            FloatingPointError: see `guards.check_finite`.
        """
        tensors = {**values, "sampler_logps": self.padded_sampler_logps}
        # A sum is finite only if all its parts are. The value of a whole sample is added to each of
        # its tokens.
        sums = sum(tensors.values())  # [samples, longest response]
        weights = self.mask
        guards.check_finite(sampler.progress, [(self.data_rows, sums, weights)], tensors)

    def select(self, is_kept: torch.Tensor) -> "Samples":
        """Returns some of the samples, in the same order.

        Args:
            is_kept: bool `[samples]`; the samples of a prompt are kept together or not at all.
        """
        rows = is_kept.nonzero().flatten().tolist()
        return Samples(
            prompts=[self.prompts[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            row_texts=[self.row_texts[row] for row in rows],
            data_rows=[self.data_rows[row] for row in rows],
            ended=self.ended[is_kept],
            per_prompt=self.per_prompt,
            sampler_logps=[self.sampler_logps[row] for row in rows],
            is_sampled=[self.is_sampled[row] for row in rows] if self.is_sampled else [],
            messages=[self.messages[row] for row in rows] if self.messages else [],
            of_episodes={name: values[is_kept] for name, values in self.of_episodes.items()},
        )

    @staticmethod
    def joined(parts: list["Samples"]) -> "Samples":
        """Returns the samples of all parts, one part after the other."""
        return Samples(
            prompts=[prompt for part in parts for prompt in part.prompts],
            responses=[response for part in parts for response in part.responses],
            row_texts=[text for part in parts for text in part.row_texts],
            data_rows=[row for part in parts for row in part.data_rows],
            ended=torch.cat([part.ended for part in parts]),
            per_prompt=parts[0].per_prompt,
            sampler_logps=[logps for part in parts for logps in part.sampler_logps],
            is_sampled=[row for part in parts for row in part.targets_of(range(len(part)))]
            if any(part.is_sampled for part in parts)
            else [],
            messages=[row for part in parts for row in part.messages],
            of_episodes={
                name: torch.cat([part.of_episodes[name] for part in parts])
                for name in parts[0].of_episodes
            },
        )

    def answers(self, tokenizer) -> list[str]:
        """Returns the text of each response, of an episode that of its last answer."""
        answers = self.responses
        if self.is_sampled:
            answers = [
                last_answer(response, is_sampled)
                for response, is_sampled in zip(self.responses, self.is_sampled)
            ]
        return decode_answers(tokenizer, answers)

    def prompt_texts(self, tokenizer, rows: Sequence[int]) -> list[str]:
        """Returns what the model read before some responses, special tokens included."""
        prompts = [tuple(self.prompts[row]) for row in rows]
        distinct = list(dict.fromkeys(prompts))  # several samples may have the same prompt
        texts = tokenizer.batch_decode(list(map(list, distinct)), skip_special_tokens=False)
        text_of = dict(zip(distinct, texts))
        return [text_of[prompt] for prompt in prompts]

    def examples(self, tokenizer, scores, source: str) -> list[dict]:
        """Returns all prompts and responses with their scores, see `common/log.py`.

        Args:
            scores: the `rewards.Scores` of the samples; None if nothing scores them.
            source: `rollout`, or where held-out prompts come from, such as `eval`.
        """
        prompts = tokenizer.batch_decode(self.prompts)
        responses = tokenizer.batch_decode(self.responses)
        examples = []
        for row, data_row in enumerate(self.data_rows):
            example = {
                "source": source,
                "row": data_row,
                "prompt": prompts[row],
                "response": responses[row],
            }
            if self.messages:
                example["messages"] = self.messages[row]
            if scores is not None:
                rewards = {name: part[row].item() for name, part in scores.parts.items()}
                # NaN: a function returned None, or an environment failed. JSON has no NaN.
                example["score"] = none_if_nan(scores.total[row].item())
                example["rewards"] = {n: none_if_nan(value) for n, value in rewards.items()}
            examples.append(example)
        return examples


def none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def share_of_groups(accelerator, n_prompts: int, per_prompt: int) -> list[int]:
    """Returns the rows of this process's samples, a prompt's samples all on one process.

    The samples of all processes together are all samples, each once; a process may have none.
    """
    groups = np.arange(n_prompts * per_prompt).reshape(-1, per_prompt)
    share = np.array_split(groups, accelerator.num_processes)[accelerator.process_index]
    return share.flatten().tolist()


def last_answer(response: list[int], is_sampled: list[bool]) -> list[int]:
    """Returns the last answer of an episode: the tokens at its end that the model drew.

    Of `5 6 7 8` these are `7 8`, if the model drew all but the 6.
    """
    start = len(response)
    while start > 0 and is_sampled[start - 1]:
        start -= 1
    return response[start:]


class Collected:
    """Collects values of response tokens, micro-batch by micro-batch, for all processes."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.names: list[str] = []
        self.of_sample: dict[int, torch.Tensor] = {}  # [response length, names], on the CPU

    def add(self, rows: list[int], mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Adds the values of a micro-batch of `Samples.scoring_batches`.

        Args:
            rows: of its samples; empty for a padding row, of which nothing is kept.
            mask: `[samples, longest]`, which places are tokens.
            values: tensors of the same shape, by name; the same names in every call.
        """
        self.names = list(values)
        stacked = torch.stack(list(values.values()), 2).cpu()
        for row, of_places, is_token in zip(rows, stacked, mask.cpu()):
            # What an environment wrote keeps its places, with values of 0. Only places after the
            # last token of the model are left out.
            end = int(is_token.nonzero()[-1]) + 1
            self.of_sample[row] = torch.where(is_token[:end, None], of_places[:end], 0.0)

    def gather(self) -> dict[str, torch.Tensor]:
        """Returns the values by name, each `[samples, longest]` on the CPU, zero after a response.

        They are the same on every process. All processes must call it.
        """
        of_samples = distributed.gather_rows(self.of_sample)
        padded = torch.nn.utils.rnn.pad_sequence(of_samples, batch_first=True)
        return dict(zip(self.names, padded.unbind(2)))
