"""On-policy distillation: a student answers, and learns what its teacher would have said.

Agarwal et al. 2023, arXiv:2306.13649 (GKD); for the loss of sampled tokens Lu et al. 2025,
https://thinkingmachines.ai/blog/on-policy-distillation. Loss of an update, with s and t the
student's and the teacher's distribution of each token of a response, given those before it:

    loss = mean over all response tokens of KL(s || t), or of another divergence by --beta

The demo, offline:
    python recipes/distill.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/distill.py --model_name_or_path M --dataset_name D --teacher_model_name_or_path T

Every metric: docs/distill.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    gc.disable()  # saves a fifth of the start: modules are never freed. `parse` enables it again

import numpy as np
import torch

from common import arguments, console, errors, launch, optim
from common.actor import Actor
from common.checkpoint import Checkpoint, carried
from common.metrics import Means
from common.run import Run
from common.shared_args import SchedulerType, arg, refuse_changed
from preference_recipes.data import chat, dataset, formats, prompts
from preference_recipes.data.messages import Conversation, LeftOut, from_text, learned_turns
from preference_recipes.models import checks, cost, load, prepare, teachers
from preference_recipes.models.divergence import DistillModel, Lesson
from preference_recipes.models.packing import Packer
from preference_recipes.models.teachers import Teachers
from preference_recipes.rollouts import correction, vllm
from preference_recipes.rollouts.args import RolloutArgs, refuse_unused
from preference_recipes.rollouts.rollout import (
    Position,
    Rollout,
    State,
    check_rollout_size,
    compute_logps,
    describe_updates,
    held_out_results,
    n_updates,
    sample,
    sample_held_out,
)
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.tools import show_preview


# ============================================================ arguments
@dataclass
class Args(RolloutArgs):
    teacher_model_name_or_path: str | None = arg(
        None, "the model to learn from: a hub name or a folder"
    )
    teacher: list[str] | None = arg(
        None, "several teachers, NAME=PATH each; the column `teacher` names a row's own"
    )
    teacher_prompt: str | None = arg(None, "column with the teacher's prompt")
    on_policy_share: float = arg(
        1.0,
        "share of prompts that the student answers; the others have a `completion`",
        at_least=0,
        at_most=1,
    )
    loss_type: Literal["divergence", "sampled"] = arg(
        "divergence", "over the vocabulary, or a policy gradient on sampled tokens"
    )
    beta: float = arg(
        1.0,
        "1: KL(student || teacher); 0: the other way round; between: Jensen-Shannon",
        at_least=0,
        at_most=1,
    )
    max_new_tokens: int = arg(1024, "longest response; completions are cut to it", at_least=1)
    train_batch_size: int = arg(128, "samples of one update", at_least=1)
    max_length: int = arg(2048, "tokens of prompt and --max_new_tokens together", at_least=2)
    lr_scheduler_type: SchedulerType = arg("constant_with_warmup", "a schedule of transformers")


# ============================================================ the algorithm
SHARE_STREAM = 4  # a stream of random numbers that no other draw has, see rollouts/rollout.py


def sampled_losses(
    logps: torch.Tensor, old_logps: torch.Tensor, teacher_logps: torch.Tensor
) -> torch.Tensor:
    """Returns the policy-gradient loss of each sampled token, which estimates the reverse KL.

    A token gets no credit for later ones (a discount of 0). At the first update of a rollout the
    expected gradient is that of KL(s || t) at each token. Nothing is clipped, so a rollout should
    make few updates. Source: Lu et al. 2025.
    """
    advantages = teacher_logps - old_logps
    ratios = torch.exp(logps - old_logps)
    return -ratios * advantages


def token_losses(
    model: torch.nn.Module,
    batch: dict,
    lessons: list[Lesson],
    stored: dict,
    args: Args,
    has_moved: bool,
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of response tokens `[samples, length]`, and values to log about them.

    Args:
        lessons: what the teachers say of the batch.
        stored: `TaughtRollout.tokens` of the same samples. Without `sampler_logps`, as in an
            evaluation, nothing is compared with the sampler, nor corrected for it.
        has_moved: whether an update was applied since the rollout was made. If not, the
            log-probs of this very pass are the old ones, so all ratios are exactly 1.
    """
    output = model(batch, args.temperature, lessons=lessons, beta=beta_of(args))
    mask = stored["mask"]
    has_sampler = "sampler_logps" in stored
    old = stored
    values = {}
    if not has_moved:
        old = {**stored, "logps": output["logps"].detach()}
        if has_sampler:  # the tokens of the data's completions were not sampled
            values = correction.sampler_differences(output, stored, mask * stored["is_own"])
    if args.loss_type == "sampled":
        losses = sampled_losses(output["logps"], old["logps"], output["teacher_logps"])
    else:
        losses = output["divergence"]
    # A server's log-probs differ from those of training. The divergence needs no correction: its
    # gradient at a token does not depend on how the token was drawn.
    if args.vllm_url and args.loss_type == "sampled" and has_sampler:
        corrections, of_sampler = correction.importance_weights(old, mask, args)
        losses = losses * corrections
        values |= of_sampler
    values |= {
        "loss": (losses, mask),
        "kl/reverse": (output["reverse_kl"], mask),
        "kl/forward": (output["forward_kl"], mask),
        "entropy": (output["entropy"], mask),
        "teacher/entropy": (output["teacher_entropy"], mask),
        "teacher/agreement": (output["agreement"], mask),
    }
    for number, name in enumerate(teachers.names(args)):  # none if one teacher has all rows
        is_taught_by = stored["teacher"] == number
        values[f"kl/reverse/{name}"] = (output["reverse_kl"], mask * is_taught_by)
    return losses, values


def beta_of(args: Args) -> float | None:
    """Returns what `DistillModel` takes as `beta`. None asks for log-probs, not a divergence."""
    return None if args.loss_type == "sampled" else args.beta


# ============================================================ a row of the data
def taught_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    teacher_names: list[str],
    teacher_prompt: str | None,
    with_completion: bool,
    strings_as_messages: bool = False,
) -> dict:
    """Returns what `prompt_row` does for one row, and what a distillation needs besides.

    That is `teacher`, if there are several; `teacher_prompt_ids`, if the teacher's prompt is in
    another column, `teacher_prompt`; and with completions what `add_completion` adds.
    """
    formats.require(row, "prompt", expected="'prompt'")
    completion: list[dict] | None = None
    if with_completion and row.get("completion") is not None:
        names = ("prompt", "completion", "label", "tools")
        pair = formats.read_demonstration({name: row.get(name) for name in names})
        prompt, [completion], _, is_text = formats.completed(pair, row, strings_as_messages)
        if not is_text:
            row = {**row, "prompt": prompt, "completion": completion}
    how = (tokenizer, max_length, max_new_tokens, strings_as_messages)
    values = prompts.prompt_row(row, *how)
    if teacher_names:
        fits = row.get("teacher") in teacher_names
        formats.refuse_unless(fits, {"teacher": None, **row}, "teacher", " or ".join(teacher_names))
        values["teacher"] = row["teacher"]
    asked = [formats.read_prompt(row, strings_as_messages)]
    if teacher_prompt is not None:
        formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
        prompt = from_text(teacher_prompt, row[teacher_prompt])
        if isinstance(prompt, str) and not isinstance(row["prompt"], str):
            prompt = [{"role": "user", "content": prompt}]
        row = {**row, "prompt": prompt, "system": None}
        values["teacher_prompt_ids"] = prompts.prompt_row(row, *how)["prompt_ids"]
        asked.append(formats.read_prompt(row, strings_as_messages))
    if with_completion:
        add_completion(values, asked, completion, tokenizer, max_new_tokens)
    return values


def add_completion(
    values: dict, asked: list[Conversation], completion: list[dict] | None, tokenizer, room: int
) -> None:
    """Adds a completion's tokens to a row, of which `room` are kept; none if the row has none.

    They are `completion_ids`, `completion_learned`, which of them the model writes, and what
    precedes them after each prompt: `context_ids`, `teacher_context_ids`.

    Args:
        asked: the prompt of the student, and that of the teacher if it has another.
    """
    contexts: list[list[int]] = [[]]
    answer = chat.Sequence([], [])
    if completion is not None:
        if not learned_turns(completion):
            raise LeftOut(formats.missing_answer(completion))
        # Its tokens are the same after both prompts: those that the student would write.
        pairs = [prompt._replace(answers=[completion]) for prompt in asked]
        encoded = [chat.encode_answers(tokenizer, *pair) for pair in pairs]
        contexts = [context for context, _, _ in encoded]
        _, [answer], notes = encoded[0]
        values["notes"] += notes
        if not any(answer.learned[:room]):
            raise LeftOut("nothing to learn within max_new_tokens")
    values["completion_ids"] = answer.ids[:room]
    values["completion_learned"] = answer.learned[:room]
    values["truncated"] = len(answer.ids) > room
    values["context_ids"] = contexts[0]
    values["teacher_context_ids"] = contexts[-1]


# ============================================================ the rollout
@carried
@dataclass
class TaughtRollout(Rollout):
    """A rollout: responses of the student or, off policy, completions of the data; all are trained.

    `tokens` are `mask sampler_logps`, `logps` if later updates need them, and of each sample
    `is_own`, whether the student drew it, and `teacher`, its teacher's number.
    """

    teachers: list[str]  # the name of each sample's teacher
    teacher_prompts: list[list[int]]  # what its teacher reads before the response

    def as_read(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the samples' lengths `[samples]`, with the longer prompt: student's or teacher's.

        It adds the same to all samples of a prompt, so they stay side by side where they are.
        """
        prompts = zip(self.samples.prompts, self.teacher_prompts)
        return lengths + [max(len(taught) - len(own), 0) for own, taught in prompts]


def make_rollout(run: Run, sampler: Sampler, state: State, packer: Packer) -> TaughtRollout:
    """Returns the next rollout: responses of the student, then completions of the data.

    At `--on_policy_share 1`, the default, there are no completions.
    """
    args = run.args
    position = state.position
    first_place = position.prompts_seen  # before prompts are taken
    prompts_of_rollout = position.take_prompts(sampler, args.rollout_batch_size)
    places = range(first_place, position.prompts_seen)
    is_own = answered_by_student(places, args)  # bool `[prompts]`
    own = columns_where(prompts_of_rollout, is_own)
    given = columns_where(prompts_of_rollout, ~is_own)

    # The student's samples come first, then those of the data; the columns are in the same order.
    parts = []
    if own["row"]:
        parts.append(sample_responses(run, sampler, position, own, is_own))
    if given["row"]:
        given = up_to_completions(given)
        parts.append(completions_of(sampler, given))
    samples = Samples.joined(parts)
    columns = {name: own[name] + given[name] for name in own}
    rollout = rollout_of(sampler, samples, columns, n_own=int(is_own.sum()))
    if args.loss_type == "sampled" and rollout.n_updates(args) > 1:
        with run.timed("score"):
            rollout.tokens |= compute_logps(sampler, samples, packer, ("logps",), reference=None)
            samples.check_finite(sampler, logps=rollout.tokens["logps"])
    return rollout


def sample_responses(
    run: Run, sampler: Sampler, position: Position, own: dict[str, list], is_own: np.ndarray
) -> Samples:
    """Samples the student's responses to its own prompts of a rollout, and logs them.

    A prompt has the random numbers of its place in the rollout, whichever others it answers.
    """
    args = run.args
    with run.timed("generate"):
        # Drawn for all processes, so that responses do not depend on how many there are.
        uniforms = position.draw_uniforms(args, len(is_own))[is_own]
        samples = sample(sampler, own, uniforms, args.temperature)
        vllm.sample_ahead(sampler, position)  # does nothing without --rollouts_ahead
    samples.check_finite(sampler)
    lengths = samples.mask.sum(1)
    sampler.means.add_rollout(
        {"completions/mean_length": lengths, "completions/clipped_ratio": ~samples.ended}
    )
    sampler.means.add_rollout({"completions/min_length": lengths}, reduce="min")
    sampler.means.add_rollout({"completions/max_length": lengths}, reduce="max")
    run.write_samples(samples.examples(sampler.tokenizer, None, "rollout"))
    return samples


def answered_by_student(places: Sequence[int], args: Args) -> np.ndarray:
    """Returns which prompts the student answers, bool `[prompts]`.

    Each has a random number that follows from the seed and its place in the run's data order.
    """
    seeds = [[args.seed, place, SHARE_STREAM] for place in places]
    draws = np.array([np.random.default_rng(seed).random() for seed in seeds])
    return draws < args.on_policy_share


def columns_where(columns: dict[str, list], is_wanted: np.ndarray) -> dict[str, list]:
    """Returns the columns of the prompts where `is_wanted` is true."""
    rows = np.flatnonzero(is_wanted)
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def up_to_completions(columns: dict[str, list]) -> dict[str, list]:
    """Returns the columns of prompts that the data answers, each up to where its answer begins.

    A template may end a prompt differently once the answer is known, see `chat.encode_answers`:

        the student is asked                  <user>Hi<bot><think>
        prompt and completion in one text     <user>Hi<bot>Hello.<end>
        so the prompt becomes                 <user>Hi<bot>
    """
    cut = {**columns, "prompt_ids": columns["context_ids"]}
    if "teacher_prompt_ids" in columns:  # with --teacher_prompt
        cut["teacher_prompt_ids"] = columns["teacher_context_ids"]
    return cut


def completions_of(sampler: Sampler, columns: dict[str, list]) -> Samples:
    """Returns the completions that the data has for some prompts."""
    completions = columns["completion_ids"]
    stops = sampler.stop_tokens()
    return Samples(
        prompts=columns["prompt_ids"],
        responses=completions,
        row_texts=columns["columns"],
        data_rows=columns["row"],
        ended=torch.tensor([ids[-1] in stops for ids in completions]),
        sampler_logps=[[0.0] * len(ids) for ids in completions],  # not drawn: `is_own` is false
        is_sampled=columns["completion_learned"],  # without results of tools, say
    )


def rollout_of(
    sampler: Sampler, samples: Samples, columns: dict[str, list], n_own: int
) -> TaughtRollout:
    """Returns the rollout of some samples: adds who teaches each, and what that teacher reads.

    Args:
        columns: of their prompts, each once. The first `n_own` were answered by the student.
    """

    def for_each_sample(of_prompts: list) -> list:
        return repeat_each(of_prompts, samples.per_prompt)

    # With several teachers, the data name each row's.
    one_teacher = [teachers.ONLY] * len(columns["row"])
    teacher_names = for_each_sample(columns.get("teacher", one_teacher))
    # Without --teacher_prompt a teacher reads what the student reads.
    teacher_prompts = for_each_sample(columns.get("teacher_prompt_ids", columns["prompt_ids"]))
    known = list(teachers.names_and_paths(sampler.args))
    is_own = torch.arange(len(samples)) < n_own * samples.per_prompt
    return TaughtRollout(
        samples=samples,
        is_trained=torch.ones(len(samples), dtype=torch.bool),
        tokens={
            "mask": samples.mask,
            "is_own": is_own[:, None],
            "teacher": torch.tensor([[known.index(name)] for name in teacher_names]),
            "sampler_logps": samples.padded_sampler_logps,
        },
        started_at=sampler.progress.global_step,
        teachers=teacher_names,
        teacher_prompts=teacher_prompts,
    )


def lessons_of(
    all_teachers: Teachers, rollout: TaughtRollout, rows: list[int], *, batch: dict, packer: Packer
) -> list[Lesson]:
    """Returns one `Lesson` for each teacher that teaches any of these samples.

    Args:
        batch: these samples, as the student reads them.
    """
    return all_teachers.lessons(
        batch,
        prompts=[rollout.teacher_prompts[row] for row in rows],
        answers=[rollout.samples.responses[row] for row in rows],
        learned=[rollout.samples.is_sampled[row] for row in rows],
        names=[rollout.teachers[row] for row in rows],
        packer=packer,
    )


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "KL to the teacher": ["kl/reverse", "kl/forward"],
    "right answers": ["eval/exact_match"],
    "loss": ["loss"],
    "entropy": ["entropy", "teacher/entropy"],
    "length": ["completions/mean_length", "eval/length"],
}


def make_student(accelerator, args: Args, tokenizer) -> DistillModel:
    """Returns the student, ready for `prepare.for_training`; see `prepare.policy`."""
    student = load.causal_lm(args.model_name_or_path, tokenizer, args)
    policy = DistillModel(student, teachers.shared_vocabulary(args, tokenizer, student))
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    return policy


def load_prompts(accelerator, args: Args, tokenizer) -> dataset.Data:
    """Returns the prompts, and completions and teachers' prompts where the arguments name them."""
    return dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=taught_row,
        max_new_tokens=args.max_new_tokens,
        teacher_names=teachers.names(args),
        teacher_prompt=args.teacher_prompt,
        with_completion=args.on_policy_share < 1,
    )


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="distill.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "distill")  # it also makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = load_prompts(accelerator, args, tokenizer)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    check_completions(args, data)
    n_prompts = len(data.train)

    policy = make_student(accelerator, args, tokenizer)
    state = State(Position())  # where the run is in its prompts, and its rollout
    run = Run(
        accelerator,
        args,
        n_prompts,
        flop=cost.flop(policy),
        bar_metric="kl/reverse",
        charts=CHARTS,
        updates_per_epoch=n_updates(args, n_prompts),
    )
    optimizer = optim.build(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    checks.check_logprobs(accelerator, model, data.train[0]["prompt_ids"])

    means = Means(accelerator)
    sampler = Sampler(accelerator, args, tokenizer, model, data, run, means)
    vllm.connect(sampler)  # does nothing without --vllm_url
    all_teachers = Teachers(accelerator, args, tokenizer, model)
    models = [model, *(teacher.model for teacher in all_teachers.by_name.values())]
    packer = checks.make_packer(
        accelerator, models, max_length=args.max_length, share=args.share_prompts
    )
    actor = Actor(run, model, tokenizer)
    of_bases = load.base_fingerprints(accelerator, policy)
    identity = {**data.fingerprints, **of_bases, **all_teachers.fingerprints}
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, means=means, actor=actor)
    checkpoint = Checkpoint(run, identity=identity, **parts, rollout=state, ahead=sampler)
    checkpoint.resume()  # sets seeds, loads what --resume names, opens the log
    what = f"{len(data.train)} rows; {packer.describe()}"
    console.begin(checkpoint, data=what, updates=describe_updates(args, n_prompts, run.total_steps))

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        evaluate(run, actor, sampler, all_teachers, packer)
    while not run.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, sampler, state, packer)
        rollout = state.rollout
        # All processes agree on the samples of this update. Each takes its share of them.
        all_rows = rollout.rows_of_update(state.position, args)
        # Sorting by these lengths keeps a group together where its prompt can be shared.
        lengths = rollout.as_read(rollout.samples.lengths_for_split(packer))
        update = run.update_of(all_rows, lengths, rollout.n_tokens(all_rows))
        response_tokens = int(rollout.tokens["mask"][all_rows].sum())  # the loss is their mean
        has_moved = run.global_step > rollout.started_at  # since it made the rollout
        for rows, weights in update.micro_batches:
            with run.timed("data"):
                data_rows = [rollout.samples.data_rows[row] for row in rows]
                batch, stored = rollout.samples.collate(rows, rollout.tokens, packer)
                token_weights = stored["mask"] * weights[:, None]
            with run.timed("teacher"):  # what the teachers say about the same tokens
                lessons = lessons_of(all_teachers, rollout, rows, batch=batch, packer=packer)
            with accelerator.accumulate(model):
                losses, values = token_losses(model, batch, lessons, stored, args, has_moved)
                run.check_finite(update, data_rows, losses, token_weights, stored)
                # This micro-batch's part of the mean over tokens. The engine divides by the
                # micro-batches of a process and averages over processes: `divisor` undoes both.
                loss = (losses * token_weights).sum() * update.divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(values, weights)
            run.count_flop(batch, weights)

        applied = run.count(update, grad_norm)  # False: gradients overflowed, nothing was learned
        of_update = dict(learning_rate=scheduler.get_last_lr()[0], loss_scale=update.loss_scale)
        means.close_update(applied, grad_norm=grad_norm, **of_update)
        if applied:
            scheduler.step()
        state.advance(args)  # a skipped update has used up its samples, too

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce())
        if run.due(args.eval_steps):
            evaluate(run, actor, sampler, all_teachers, packer)
        actor.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce())  # what is in no line yet
    actor.save()
    console.end(actor)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(
    run: Run, actor: Actor, sampler: Sampler, all_teachers: Teachers, packer: Packer
) -> None:
    """Logs how the student answers held-out prompts, and how far it is from its teachers."""
    line = {}
    examples = []
    with run.timed("paused"), checks.evaluation_mode(actor.model):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = sample_held_out(sampler, eval_set)
            rollout = rollout_of(sampler, samples, eval_set[:], n_own=len(eval_set))
            del rollout.tokens["sampler_logps"]  # so that nothing is corrected for the sampler
            means = Means(run.accelerator)
            for rows, weights in run.split(range(len(samples)), rollout.as_read(samples.lengths)):
                batch, stored = samples.collate(rows, rollout.tokens, packer)
                lessons = lessons_of(all_teachers, rollout, rows, batch=batch, packer=packer)
                _, values = token_losses(
                    actor.model, batch, lessons, stored, run.args, has_moved=False
                )
                means.add(values, weights)
            line |= {prefix + name: value for name, value in means.reduce().items()}
            of_responses, shown = held_out_results(sampler, samples, None, eval_set, prefix)
            line |= of_responses
            examples += shown
    run.log_evaluation(line, examples)
    actor.keep_best(line)  # may end the run, see --stop_after


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or cannot work."""
    teachers.names_and_paths(args)  # exits if none is named, or one twice
    check_rollout_size(args)
    refuse_unused(args)
    if args.loss_type == "divergence":
        of_correction = ["sampler_correction", "sampler_correction_max"]
        refuse_changed(args, of_correction, "only --loss_type sampled is corrected")
    if args.loss_type == "sampled" and args.beta != 1:
        sys.exit(
            f"--beta {args.beta:g} --loss_type sampled: sampled tokens estimate the reverse KL "
            "alone. Take --beta 1, or --loss_type divergence"
        )
    if args.on_policy_share == 1:
        return
    share = f"--on_policy_share {args.on_policy_share:g}"
    if args.loss_type == "sampled":
        sys.exit(f"{share} --loss_type sampled: completions were not drawn by the student")
    if args.rollouts_ahead:
        sys.exit(f"{share} --rollouts_ahead 1: not supported together")
    if args.n_samples_per_prompt > 1:
        sys.exit(f"{share}: the data has one completion of a prompt: give --n_samples_per_prompt 1")


def check_completions(args: Args, data: dataset.Data) -> None:
    """Refuses training rows without a completion if some prompts are to be answered by one."""
    if args.on_policy_share == 1:
        return
    for part in data.train.select_columns(["row", "completion_ids"]).iter(1000):
        for row, completion in zip(part["row"], part["completion_ids"]):
            if not completion:
                sys.exit(
                    f"--on_policy_share {args.on_policy_share:g}: row {row} of the training data "
                    "has no 'completion', which is needed where the student does not answer it: "
                    "expected a string or a list of messages, as in recipes/sft.py"
                )


if __name__ == "__main__":
    errors.run(main)
