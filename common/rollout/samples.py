"""The samples of a rollout, their micro-batches for scoring, and values gathered by token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from common import batches, distributed
from common.checkpoint import carried
from common.models.packing import Packer
from common.run import Run

# What a process scores at once where `--score_batch_size` is 0, in tokens, padding counted. Without
# gradients a token takes about a third of what it takes in training.
SCORED_TOKENS = 2**15


@carried
@dataclass
class Samples:
    """Prompts with one response each, the same on every process.

    A prompt with several responses stands here once for each of them, side by side.

    Attributes:
        prompts, responses: token ids.
        row_texts: the prompt's row in the data, as a JSON text.
        rows: the number of that row, from 1.
        ended: bool `[samples]`, whether the response ends with a stop token.
        per_prompt: how many samples, side by side, answer the same prompt.
        sampler_logps: the log-prob of each token of each response, as the sampler computed it when
            it drew the token; an empty list for a response that was generated greedily.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    row_texts: list[str]
    rows: list[int]
    ended: torch.Tensor
    per_prompt: int = 1
    sampler_logps: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each prompt with its response, `[samples]`."""
        pairs = zip(self.prompts, self.responses)
        return np.array([len(prompt) + len(response) for prompt, response in pairs])

    @property
    def group_lengths(self) -> np.ndarray:
        """The longest of the lengths of each sample's group, `[samples]`.

        Sorted by them, the samples of a group stand side by side and can share their prompt.
        """
        return self.lengths.reshape(-1, self.per_prompt).max(1).repeat(self.per_prompt)

    @property
    def mask(self) -> torch.Tensor:
        """bool `[samples, longest response]`, where a response has a token."""
        lengths = torch.tensor([[len(response)] for response in self.responses])
        return torch.arange(lengths.max()) < lengths

    @property
    def padded_sampler_logps(self) -> torch.Tensor:
        """fp32 `[samples, longest response]`: `sampler_logps`, zero behind a response."""
        rows = [torch.tensor(logps, dtype=torch.float32) for logps in self.sampler_logps]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def scoring_batches(self, run: Run, packer: Packer) -> Iterator[tuple[list[int], dict]]:
        """Yields this process's micro-batches: the numbers of their samples, and what models read.

        The samples of all processes together are all samples, each once. A process that has none
        still gets inputs, of a padding row, because the others wait for its forward pass. The
        numbers are an empty list then, and nothing of that pass is kept.

        They hold `--score_batch_size` samples, or as many as fit into `SCORED_TOKENS`.
        """
        numbers = np.arange(len(self))
        lengths = self.group_lengths
        batch_size = run.args.score_batch_size
        most_tokens = 0 if batch_size else SCORED_TOKENS
        for micro_batch in batches.split(
            run.accelerator, numbers, lengths, batch_size, most_tokens
        ):
            batch = packer.make_batch(
                [self.prompts[number] for number in micro_batch.rows],
                [self.responses[number] for number in micro_batch.rows],
            )
            is_real = micro_batch.weights.any()
            yield (micro_batch.rows if is_real else []), batch

    def whole_groups(self, accelerator) -> list[int]:
        """Returns the numbers of this process's samples, a prompt's samples all on one process.

        The samples of all processes together are all samples, each once; a process may have none.
        """
        prompts = np.arange(len(self.responses)).reshape(-1, self.per_prompt)
        share = np.array_split(prompts, accelerator.num_processes)[accelerator.process_index]
        return share.flatten().tolist()

    def select(self, is_kept: torch.Tensor) -> "Samples":
        """Returns some of the samples, in the same order.

        Args:
            is_kept: bool `[samples]`; the samples of a prompt are kept together or not at all.
        """
        numbers = is_kept.nonzero().flatten().tolist()
        return Samples(
            prompts=[self.prompts[number] for number in numbers],
            responses=[self.responses[number] for number in numbers],
            row_texts=[self.row_texts[number] for number in numbers],
            rows=[self.rows[number] for number in numbers],
            ended=self.ended[is_kept],
            per_prompt=self.per_prompt,
            sampler_logps=[self.sampler_logps[number] for number in numbers],
        )

    @staticmethod
    def joined(parts: list["Samples"]) -> "Samples":
        """Returns the samples of several objects behind each other."""
        return Samples(
            prompts=[prompt for part in parts for prompt in part.prompts],
            responses=[response for part in parts for response in part.responses],
            row_texts=[text for part in parts for text in part.row_texts],
            rows=[row for part in parts for row in part.rows],
            ended=torch.cat([part.ended for part in parts]),
            per_prompt=parts[0].per_prompt,
            sampler_logps=[logps for part in parts for logps in part.sampler_logps],
        )

    def examples(self, tokenizer, scores, source: str) -> list[dict]:
        """Returns all prompts and responses with their scores, see `common/transcript.py`.

        Args:
            scores: the `rewards.Scores` of the samples.
            source: `rollout`, or where held-out prompts come from, such as `eval`.
        """
        prompts = tokenizer.batch_decode(self.prompts)
        responses = tokenizer.batch_decode(self.responses)
        parts = {name: part.tolist() for name, part in scores.parts.items()}
        examples = []
        for number, (prompt, response) in enumerate(zip(prompts, responses)):
            example = {
                "source": source,
                "row": self.rows[number],
                "prompt": prompt,
                "response": response,
                "score": scores.total[number].item(),
            }
            # NaN: the function returned None. JSON has no NaN.
            rewards = {name: part[number] for name, part in parts.items()}
            if rewards:
                example["rewards"] = {
                    name: None if math.isnan(reward) else reward for name, reward in rewards.items()
                }
            examples.append(example)
        return examples


class Collected:
    """Collects values of response tokens, micro-batch by micro-batch, for all processes."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.names: list[str] = []
        self.of_sample: dict[int, torch.Tensor] = {}  # [tokens of the response, names], on the CPU

    def add(self, numbers: list[int], mask: torch.Tensor, **values: torch.Tensor) -> None:
        """Adds the values of a micro-batch of `Samples.scoring_batches`.

        Args:
            numbers: of its samples; empty for a padding row, of which nothing is kept.
            mask: `[samples, longest]`, which places are tokens.
            values: tensors of the same shape, by name; the same names in every call.
        """
        self.names = list(values)
        stacked = torch.stack(list(values.values()), 2).cpu()
        for number, of_tokens, is_token in zip(numbers, stacked, mask.cpu()):
            self.of_sample[number] = of_tokens[is_token]

    def gather(self) -> dict[str, torch.Tensor]:
        """Returns the values by name, each `[samples, longest]` on the CPU, zero behind a response.

        They are the same on every process. All processes must call it.
        """
        of_samples = distributed.gather_rows(self.of_sample)
        padded = torch.nn.utils.rnn.pad_sequence(of_samples, batch_first=True)
        return dict(zip(self.names, padded.unbind(2)))
