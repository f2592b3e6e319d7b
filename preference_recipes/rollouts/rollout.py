"""Rollouts: sampling them, what their updates need to know, where a run is in its prompts."""

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common import batches, counted, distributed
from common.checkpoint import carried
from preference_recipes.models import checks
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts import answers
from preference_recipes.rollouts.generation import generate
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, repeat_each

# Random numbers are drawn from [seed, rollout, stream, ...]. Each purpose has a stream of its own:
# these do not share numbers.
SAMPLING_STREAM = 1
ORDER_STREAM = 2


def sample(sampler: Sampler, prompts: dict, uniforms: np.ndarray, temperature: float) -> Samples:
    """Draws responses to prompts, the same on every process. All processes must call it.

    Args:
        prompts: columns of the data: `prompt_ids`, `columns` (the row as a JSON text) and `row`
            (its number), each prompt once.
        uniforms: `[prompts, responses to each, max_new_tokens]` in [0, 1), see `SampleByUniform`;
            a server draws with seeds that are made from them.
    """
    if sampler.stage is not None:  # with --environment
        return sampler.stage.play(prompts, uniforms, temperature)
    _, per_prompt, max_new_tokens = uniforms.shape  # a number for each token of each response
    prompt_of_each = repeat_each(prompts["prompt_ids"], per_prompt)
    if sampler.servers is not None:
        responses = sampler.servers.generate(prompts["prompt_ids"], uniforms, temperature)
    else:
        how = dict(temperature=temperature, uniforms=uniforms.reshape(-1, max_new_tokens))
        responses = generate(sampler, prompt_of_each, max_new_tokens, **how)
    stops = sampler.stop_tokens()
    return Samples(
        prompts=prompt_of_each,
        responses=[response.ids for response in responses],
        row_texts=repeat_each(prompts["columns"], per_prompt),
        data_rows=repeat_each(prompts["row"], per_prompt),
        ended=torch.tensor([response.ids[-1] in stops for response in responses]),
        per_prompt=per_prompt,
        sampler_logps=[response.logps for response in responses],
    )


@torch.no_grad()
def compute_logps(
    sampler: Sampler,
    samples: Samples,
    packer: Packer,
    names: tuple[str, ...],
    reference: Reference | None,
) -> dict[str, Any]:
    """Returns the model's outputs of these names of response tokens, and `ref_logps`.

    `[samples, longest response]`, zero past the end of each response, the same on every process.
    All processes must call it.
    """
    if not names and reference is None:
        return {}
    temperature = sampler.args.temperature
    of_sample = {}  # tensors [response length, names], on the CPU
    with checks.evaluation_mode(sampler.model):
        for rows, batch in samples.scoring_batches(sampler, packer):
            per_token = []
            if names:
                output = sampler.model(batch, temperature)
                per_token = [output[name] for name in names]
            if reference is not None:
                per_token.append(reference.logps(batch, temperature))
            of_places = torch.stack(per_token, 2).cpu()
            for row, values, is_token in zip(rows, of_places, batch["mask"].cpu()):
                # What an environment wrote keeps its places, with values of 0. Only places after
                # the last token of the model are left out.
                end = int(is_token.nonzero()[-1]) + 1
                of_sample[row] = torch.where(is_token[:end, None], values[:end], 0.0)
    padded = pad_sequence(distributed.gather_rows(of_sample), batch_first=True)
    return dict(zip((*names, "ref_logps"), padded.unbind(2)))  # without a reference zip ends early


# ============================================================ what a run carries
@carried
@dataclasses.dataclass
class Position:
    """Where a run is in its prompts and rollouts."""

    prompts_seen: int = 0  # taken so far, over all epochs
    prompts_done: int = 0  # those of them whose rollouts are finished
    rollouts_seen: int = 0  # finished ones: all their updates are made
    updates_made: int = 0  # of the current rollout

    def take_prompts(self, sampler: Sampler, most: int) -> dict:
        """Returns the columns of the next prompts, at most to the end of the epoch."""
        rows = batches.rows_from(
            len(sampler.data.train), sampler.args.seed, self.prompts_seen, most
        )
        self.prompts_seen += len(rows)
        return sampler.data.train[rows]

    def draw_uniforms(self, args, n_prompts: int, round_number: int = 0) -> np.ndarray:
        """Returns the numbers that decide the tokens of the rollout, see `sample`.

        They depend on the seed, the rollout and its round alone.
        """
        seeds = [args.seed, self.rollouts_seen, SAMPLING_STREAM, round_number]
        shape = (n_prompts, args.n_samples_per_prompt, args.max_new_tokens)
        return np.random.default_rng(seeds).random(shape)

    def order_seed(self, args) -> tuple[int, ...]:
        return (args.seed, self.rollouts_seen, ORDER_STREAM)

    def end_rollout(self) -> None:
        self.prompts_done = self.prompts_seen
        self.rollouts_seen += 1
        self.updates_made = 0


@carried
@dataclasses.dataclass
class Rollout:
    """Samples and what their updates need to know about them; on the CPU of every process."""

    samples: Samples
    is_trained: torch.Tensor  # bool `[samples]`
    # By name `[samples, longest response]`, or `[samples, 1]` if all tokens have the same value.
    tokens: dict[str, torch.Tensor]
    started_at: int  # `global_step` before the rollout's first update

    def updates_per_pass(self, args) -> int:
        return math.ceil(int(self.is_trained.sum()) / args.train_batch_size)

    def n_updates(self, args) -> int:
        return args.num_epochs_per_rollout * self.updates_per_pass(args)

    def rows_of_update(self, position: Position, args) -> np.ndarray:
        """Returns which samples form the next update.

        In each pass the groups come in a seeded order, their samples side by side, so that most can
        share the prompt. Updates differ in size by at most one sample: a small leftover would get a
        whole optimizer step of its own.
        """
        n_updates = self.updates_per_pass(args)
        pass_number, update_of_pass = divmod(position.updates_made, n_updates)
        per_prompt = self.samples.per_prompt
        n_groups = len(self.samples) // per_prompt
        groups = batches.epoch_order(n_groups, position.order_seed(args), pass_number)
        rows = (groups[:, None] * per_prompt + np.arange(per_prompt)).flatten()
        trained = rows[self.is_trained[rows].numpy()]
        return np.array_split(trained, n_updates)[update_of_pass]

    def n_tokens(self, rows: np.ndarray) -> int:
        """The tokens of some samples, prompts and responses."""
        return int(self.samples.lengths[rows].sum())


@carried
@dataclasses.dataclass
class State:
    """What a run that samples carries from update to update. A checkpoint holds it."""

    position: Position
    rollout: Rollout | None = None  # whose updates are being made; None: the next one is due

    def state(self) -> "State":
        return self

    def load_state(self, saved: "State") -> None:
        """Goes to the saved state. The position stays one object, since the counters read it."""
        vars(self.position).update(vars(saved.position))
        vars(self).update({**vars(saved), "position": self.position})

    def advance(self, args) -> None:
        """Counts an update. After the last one of its rollout, the next rollout is due."""
        self.position.updates_made += 1
        if self.position.updates_made == self.rollout.n_updates(args):
            self.position.end_rollout()
            self.rollout = None


# ============================================================ how many updates
def n_updates(args, n_prompts: int) -> int:
    """Returns the updates of so many prompts, cut into rollouts, of which the last may be short."""
    n_full, rest = divmod(n_prompts, args.rollout_batch_size)

    def of_rollout(prompts: int) -> int:
        samples = prompts * args.n_samples_per_prompt
        return args.num_epochs_per_rollout * math.ceil(samples / args.train_batch_size)

    return n_full * of_rollout(args.rollout_batch_size) + of_rollout(rest)


def describe_updates(args, n_prompts: int, total_steps: int) -> str:
    prompts = args.rollout_batch_size
    samples = prompts * args.n_samples_per_prompt
    most = "at most " if getattr(args, "drop_equal_groups", False) else ""  # GRPO drops groups
    return (
        f"a rollout: {counted(prompts, 'prompt')}, {counted(samples, 'sample')}, "
        f"{most}{counted(n_updates(args, prompts), 'update')}; "
        f"an epoch: {counted(math.ceil(n_prompts / prompts), 'rollout')}, "
        f"{most}{counted(n_updates(args, n_prompts), 'update')}; "
        f"{'' if args.max_steps else most}{counted(total_steps, 'update')} in all"
    )


def check_rollout_size(args) -> None:
    """Refuses a rollout of fewer samples than an update: `--train_batch_size` would be ignored."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples < args.train_batch_size and not args.preview:
        least = math.ceil(args.train_batch_size / args.n_samples_per_prompt)
        sys.exit(
            f"a rollout has {samples} samples, fewer than --train_batch_size "
            f"{args.train_batch_size}. Smallest valid size: --rollout_batch_size {least}"
        )


# ============================================================ evaluation
def sample_held_out(sampler: Sampler, eval_set) -> Samples:
    """Returns the policy's greedy responses to a held-out set. All processes must call it."""
    unused = np.zeros((len(eval_set), 1, sampler.args.max_new_tokens))  # nothing is drawn
    return sample(sampler, eval_set[:], unused, temperature=0.0)


def held_out_results(
    sampler: Sampler, samples: Samples, scores: Scores | None, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Returns the line of a held-out set's evaluation, and its samples for `samples.jsonl`."""
    values: dict[str, Any] = {} if scores is None else {"scores": scores.total}
    values |= {"length": samples.mask.sum(1), "eos_rate": samples.ended, **samples.of_episodes}
    if "answer" in eval_set.column_names:
        prompts = sampler.tokenizer.batch_decode(samples.prompts)
        texts = samples.answers(sampler.tokenizer)
        values["exact_match"] = [
            answers.is_right(text, answer, prompt) if answer else np.nan
            for text, answer, prompt in zip(texts, eval_set["answer"][:], prompts)
        ]
    if scores is not None:
        values |= {f"rewards/{name}/mean": part for name, part in scores.parts.items()}
    line = {}
    for name, of_samples in values.items():
        numbers = np.asarray(of_samples, dtype=float)
        if not np.isnan(numbers).all():  # NaN counts nowhere
            line[prefix + name] = float(np.nanmean(numbers))
    return line, samples.examples(sampler.tokenizer, scores, prefix.rstrip("/"))
