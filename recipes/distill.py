"""On-policy distillation: a student answers, and learns what its teacher would have said.

Agarwal et al. 2023, arXiv:2306.13649 (GKD); for the loss of sampled tokens Lu et al. 2025,
https://thinkingmachines.ai/blog/on-policy-distillation. Loss of an update, with s and t the
student's and the teacher's distribution of each token of a response, given those before it:

    loss = mean over all response tokens of KL(s || t), or of another divergence by --beta

Demo, offline:
    python recipes/distill.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/distill.py \
        --model_name_or_path M --dataset_name D --teacher_model_name_or_path T
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/distill.py --model_name_or_path M --dataset_name D --teacher_model_name_or_path T
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/distill.py

Every metric: docs/distill.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import common

# Another package called `common` may come first on the path.
if getattr(common, "PROJECT", None) != "preference-recipes":
    raise SystemExit(
        f"'common' is {common.__file__ or common.__path__[0]}, not this recipe's package: move or "
        "rename it, or keep the recipe in another folder, and `pip install -e` its repository"
    )
common.check_recipe(__file__)

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from common import (
    actor,
    arguments,
    batches,
    checkpoint,
    console,
    engine,
    errors,
    guards,
    hub,
    launch,
    optim,
)
from common.metrics import Logged, Means, Metrics
from common.progress import Progress
from common.run import Run
from common.shared_args import RolloutArgs, SchedulerType, arg, refuse_changed
from preference_recipes.data import chat, dataset, prompts
from preference_recipes.models import checks, load, lora, prepare, teachers
from preference_recipes.models.divergence import DistillModel, Lesson
from preference_recipes.models.packing import Packer
from preference_recipes.models.teachers import Teachers
from preference_recipes.rollouts import correction, evaluation, generation, schedule, vllm
from preference_recipes.rollouts.samples import Collected, Samples
from preference_recipes.rollouts.schedule import Position, RolloutSchedule
from preference_recipes.tools import preview


# ============================================================ arguments
@dataclass
class Args(RolloutArgs):
    teacher_model_name_or_path: str | None = arg(
        default=None, help="the model to learn from: a hub name or a folder"
    )
    teacher: list[str] | None = arg(
        default=None,
        help="several models to learn from, NAME=PATH each; the column `teacher` of a row names "
        "the one that teaches it",
    )
    teacher_prompt: str | None = arg(
        default=None,
        help="column with the prompt that the teacher reads instead of the student's; with it and "
        "--lora_r no teacher need be named: it is then the student without its adapters",
    )
    on_policy_share: float = arg(
        default=1.0,
        at_least=0,
        at_most=1,
        help="share of the prompts that the student answers; the others are answered by the "
        "column `completion`",
    )
    loss_type: Literal["divergence", "sampled"] = arg(
        default="divergence",
        help="divergence: over the whole vocabulary; sampled: a policy gradient that needs only "
        "the log-probs of the sampled tokens, see docs/distill.md",
    )
    beta: float = arg(
        default=1.0,
        at_least=0,
        at_most=1,
        help="which divergence. 1: the reverse KL, KL(student || teacher); 0: the forward KL; in "
        "between: the generalised Jensen-Shannon divergence",
    )
    max_new_tokens: int = arg(
        default=1024, at_least=1, help="longest response; completions are cut to it"
    )

    train_batch_size: int = arg(
        default=128, at_least=1, help="samples of one update, over all processes"
    )
    max_length: int = arg(
        default=2048,
        at_least=2,
        help="tokens of prompt and response together; prompts without room for --max_new_tokens "
        "are left out",
    )
    lr_scheduler_type: SchedulerType = arg(
        default="constant_with_warmup", help="see transformers.get_scheduler"
    )


# ============================================================ the algorithm
# Which prompts the student answers is drawn from [seed, place, stream], with a stream that no other
# draw has, see `preference_recipes/rollouts/schedule.py`.
SHARE_STREAM = 4


def sampled_losses(
    logps: torch.Tensor, old_logps: torch.Tensor, teacher_logps: torch.Tensor
) -> torch.Tensor:
    """Returns the policy-gradient loss of each sampled token, which estimates the reverse KL.

    The advantage of a token is the teacher's log-prob minus the student's old one; a token gets no
    credit for later ones (a discount of 0). At the first update of a rollout the expected gradient
    is that of KL(s || t) at each token.

    Source: Lu et al. 2025. Nothing is clipped: do not let a rollout make many updates.

    Args:
        old_logps: of the student before the rollout's first update.
    """
    advantages = teacher_logps - old_logps
    ratios = torch.exp(logps - old_logps)
    return -ratios * advantages


def losses_and_metrics(
    output: dict, old: dict, weights: torch.Tensor, args: Args
) -> tuple[torch.Tensor, torch.Tensor, list[Logged]]:
    """Returns the losses of response tokens, their weights, and what to log about them.

    Args:
        output: what `DistillModel.forward` returned, given lessons. One of its values has a
            gradient: `divergence` or, with `--loss_type sampled`, `logps`.
        old: `Rollout.tokens` of the same samples, with `logps` for `--loss_type sampled`. Without
            `sampler_logps`, as in an evaluation, nothing is corrected for the sampler.
        weights: `[samples]`, 0 for a padding row.

    Returns:
        losses and weights `[samples, length]`; metrics.
    """
    if args.loss_type == "sampled":
        losses = sampled_losses(output["logps"], old["logps"], output["teacher_logps"])
    else:
        losses = output["divergence"]
    token_weights = old["mask"] * weights[:, None]
    sampler_metrics = []
    # A server's log-probs differ from those of training. The divergence needs no correction: its
    # gradient at a token does not depend on how the token was drawn.
    is_corrected = args.vllm_url and args.loss_type == "sampled" and "sampler_logps" in old
    if is_corrected:
        corrections, sampler_metrics = correction.importance_weights(old, token_weights, args)
        losses = losses * corrections
    per_token = {
        "loss": losses,
        "kl/reverse": output["reverse_kl"],
        "kl/forward": output["forward_kl"],
        "entropy": output["entropy"],
        "teacher/entropy": output["teacher_entropy"],
        "teacher/agreement": output["agreement"],
    }
    logged = [Logged(per_token, token_weights)]
    for name in teachers.names(args):  # none if one teacher has all rows
        is_taught_by = old["teacher"] == teachers.numbers(args)[name]
        of_teacher = {f"kl/reverse/{name}": output["reverse_kl"]}
        logged.append(Logged(of_teacher, token_weights * is_taught_by))
    return losses, token_weights, logged + sampler_metrics


# ============================================================ the rollout
@checkpoint.carried
@dataclass
class Rollout:
    """Samples and what their updates need to know about them; on the CPU of every process.

    Attributes:
        samples: responses of the student or, off policy, completions of the data.
        teachers: the name of each sample's teacher.
        teacher_prompts: what its teacher reads before the response, token ids.
        tokens: tensors by name, each `[samples, longest response]` or `[samples, 1]`:
            `mask`: which are tokens of the response.
            `is_own`: `[samples, 1]`, whether the student drew the response.
            `teacher`: `[samples, 1]`, the number of the sample's teacher, for metrics.
            `sampler_logps`: log-probs as the sampler computed them.
            `logps`, if an update needs them: those of the student before the first update.
        started_at: `global_step` before the rollout's first update.
    """

    samples: Samples
    teachers: list[str]
    teacher_prompts: list[list[int]]
    tokens: dict[str, torch.Tensor]
    started_at: int


@checkpoint.carried
@dataclass
class State:
    """What a run carries from update to update.

    Attributes:
        position: where the run is in its prompts and rollouts.
        rollout: the one whose updates are being made; None: the next one is due.
    """

    position: Position
    rollout: Rollout | None = None


def make_rollout(run: Run, all_teachers: Teachers, packer: Packer) -> Rollout:
    """Returns the next rollout: responses of the student, then completions of the data.

    At `--on_policy_share 1`, the default, there are no completions.
    """
    args = run.args
    position = run.extra.position
    first_place = position.prompts_seen  # before prompts are taken
    prompts_of_rollout = position.take_prompts(run, args.rollout_batch_size)
    places = range(first_place, position.prompts_seen)
    is_own = answered_by_student(places, args)  # bool `[prompts]`
    own = columns_where(prompts_of_rollout, is_own)
    given = columns_where(prompts_of_rollout, ~is_own)

    # The student's samples come first, then those of the data; the columns are in the same order.
    parts = []
    if own["row"]:
        parts.append(sample_responses(run, own, is_own))
    if given["row"]:
        given = up_to_completions(given)
        parts.append(completions_of(run, given))
    samples = Samples.joined(parts)
    columns = {name: own[name] + given[name] for name in own}
    rollout = rollout_of(run, samples, columns, n_own=int(is_own.sum()))
    if args.loss_type == "sampled" and updates_of(rollout, args) > 1:
        with run.metrics.timed("score"):
            rollout.tokens["logps"] = compute_logps(run, rollout, all_teachers, packer)
    return rollout


def sample_responses(run: Run, own: dict[str, list], is_own: np.ndarray) -> Samples:
    """Samples the student's responses to its own prompts of a rollout, and logs them.

    Args:
        own: the columns of these prompts.
        is_own: bool `[prompts of the rollout]`. A prompt has the random numbers of its place in the
            rollout, whichever others the student answers.
    """
    args = run.args
    with run.metrics.timed("generate"):
        # Drawn for all processes, so that responses do not depend on how many there are.
        uniforms = run.extra.position.draw_uniforms(args, len(is_own))[is_own]
        samples = generation.sample(run, own, uniforms, args.temperature)
        vllm.sample_ahead(run)  # does nothing without --rollouts_ahead
    samples.check_finite(run)
    log_rollout(run, samples)
    return samples


def answered_by_student(places: Sequence[int], args: Args) -> np.ndarray:
    """Returns which prompts the student answers, bool `[prompts]`.

    Each prompt has a random number of its own, which follows from the seed and its place. So it
    does not depend on how many prompts a rollout has.

    Args:
        places: of the prompts in the data order of the whole run, counted from 0.
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

    A template may end a prompt differently once the answer is known, see `tokens.Answer`:

        the student is asked                  <user>Hi<bot><think>
        prompt and completion in one text     <user>Hi<bot>Hello.<end>
        so the prompt becomes                 <user>Hi<bot>

    The data has these prompts as `context_ids`, and the teacher's as `teacher_context_ids`.
    """
    cut = {**columns, "prompt_ids": columns["context_ids"]}
    if "teacher_prompt_ids" in columns:  # with --teacher_prompt
        cut["teacher_prompt_ids"] = columns["teacher_context_ids"]
    return cut


def completions_of(run: Run, columns: dict[str, list]) -> Samples:
    """Returns the completions that the data has for some prompts."""
    completions = columns["completion_ids"]
    stops = chat.stop_tokens(run.tokenizer, run.unwrapped.model)
    return Samples(
        prompts=columns["prompt_ids"],
        responses=completions,
        row_texts=columns["columns"],
        data_rows=columns["row"],
        ended=torch.tensor([ids[-1] in stops for ids in completions]),
        sampler_logps=[[0.0] * len(ids) for ids in completions],  # not drawn: `is_own` is false
    )


def rollout_of(run: Run, samples: Samples, columns: dict[str, list], n_own: int) -> Rollout:
    """Returns the rollout of some samples: adds who teaches each, and what that teacher reads.

    Args:
        columns: of their prompts, each once, in the order of the samples.
        n_own: how many of the prompts the student has answered; these come first.
    """

    def for_each_sample(of_prompts: list) -> list:
        return generation.repeat_each(of_prompts, samples.per_prompt)

    # With several teachers, the data name each row's.
    one_teacher = [teachers.ONLY] * len(columns["row"])
    teacher_names = for_each_sample(columns.get("teacher", one_teacher))
    # Without --teacher_prompt a teacher reads what the student reads.
    teacher_prompts = for_each_sample(columns.get("teacher_prompt_ids", columns["prompt_ids"]))
    number_of = teachers.numbers(run.args)
    is_own = torch.arange(len(samples)) < n_own * samples.per_prompt
    return Rollout(
        samples=samples,
        teachers=teacher_names,
        teacher_prompts=teacher_prompts,
        tokens={
            "mask": samples.mask,
            "is_own": is_own[:, None],
            "teacher": torch.tensor([[number_of[name]] for name in teacher_names]),
            "sampler_logps": samples.padded_sampler_logps,
        },
        started_at=run.progress.global_step,
    )


def compute_logps(
    run: Run, rollout: Rollout, all_teachers: Teachers, packer: Packer
) -> torch.Tensor:
    """Returns the student's log-probs of response tokens before a rollout's first update.

    The teachers run, too, only because the student's forward pass depends on them: with their
    lessons, as in training, its logits are fp32, and without them half precision. Micro-batches are
    cut differently, so the rounding of some log-probs differs from that in training.

    Returns:
        `[samples, longest response]`, zero past the end of each response,
        the same on every process.
    """
    collected = Collected(run.accelerator)
    for rows, weights, old, output in forward_passes(run, rollout, all_teachers, packer):
        # A micro-batch is all samples or one padding row, which is not collected.
        kept_rows = rows if weights.any() else []
        collected.add(kept_rows, old["mask"], logps=output["logps"])
    logps = collected.gather()["logps"]
    rollout.samples.check_finite(run, logps=logps)
    return logps


@torch.no_grad()
def forward_passes(
    run: Run, rollout: Rollout, all_teachers: Teachers, packer: Packer
) -> Iterator[tuple[list[int], torch.Tensor, dict, dict]]:
    """Runs the student and its teachers over a rollout, without gradients.

    Yields:
        for each micro-batch of this process: rows, their weights `[rows]`, 0 for a padding row,
        their `Rollout.tokens`, and what the student's model returned.
    """
    all_rows = np.arange(len(rollout.samples))
    with checks.evaluation_mode(run.model):
        for micro_batch in batches.split_update(run, all_rows, rollout.samples.lengths):
            rows = micro_batch.rows
            weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
            batch, old = rollout.samples.collate(rows, rollout.tokens, packer)
            lessons = lessons_of(all_teachers, rollout, rows, batch=batch, packer=packer)
            output = run.model(batch, run.args.temperature, lessons=lessons, beta=beta_of(run.args))
            yield rows, weights, old, output


def log_rollout(run: Run, samples: Samples) -> None:
    """Adds the metrics of responses to the next log line, and records the samples."""
    lengths = samples.mask.sum(1)
    run.metrics.add_rollout(
        {"completions/mean_length": lengths, "completions/clipped_ratio": ~samples.ended}
    )
    run.metrics.add_rollout({"completions/min_length": lengths}, reduce="min")
    run.metrics.add_rollout({"completions/max_length": lengths}, reduce="max")
    run.metrics.log_samples(None, samples.examples(run.tokenizer, None, "rollout"))


# ============================================================ the updates of a rollout
def updates_per_pass(rollout: Rollout, args: Args) -> int:
    """Returns the number of updates of one pass over the samples."""
    return math.ceil(len(rollout.samples) / args.train_batch_size)


def updates_of(rollout: Rollout, args: Args) -> int:
    """Returns the number of updates that a rollout makes."""
    return args.num_epochs_per_rollout * updates_per_pass(rollout, args)


def rows_of_update(rollout: Rollout, position: Position, args: Args) -> np.ndarray:
    """Returns which samples of the rollout form its next update, in a seeded order.

    The updates of a pass differ in size by at most one sample: a small leftover would get a whole
    optimizer step of its own. The samples of a prompt may be split.
    """
    n_updates = updates_per_pass(rollout, args)
    pass_number, update_of_pass = divmod(position.update, n_updates)
    rows = position.order_of_groups(args, rollout.samples, pass_number)
    return np.array_split(rows, n_updates)[update_of_pass]


def lessons_of(
    all_teachers: Teachers, rollout: Rollout, rows: list[int], *, batch: dict, packer: Packer
) -> list[Lesson]:
    """Returns one `Lesson` for each teacher that teaches any of these samples.

    It holds the teacher's hidden states at the response tokens, without gradients, and its output
    layer, from which logits are made by chunks. See `Teachers.lessons`.

    Args:
        rows: the samples.
        batch: these samples, as the student reads them.
    """
    return all_teachers.lessons(
        batch,
        prompts=[rollout.teacher_prompts[row] for row in rows],
        answers=[rollout.samples.responses[row] for row in rows],
        names=[rollout.teachers[row] for row in rows],
        packer=packer,
    )


def beta_of(args: Args) -> float | None:
    """Returns what `DistillModel` takes as `beta`. None asks for log-probs, not a divergence."""
    return None if args.loss_type == "sampled" else args.beta


def advance_rollout(run: Run) -> None:
    """Counts an update. After the last one of its rollout, the next rollout is due."""
    state: State = run.extra
    state.position.update += 1
    if state.position.update == updates_of(state.rollout, run.args):
        state.position.end_rollout()
        state.rollout = None


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "KL to the teacher": ["kl/reverse", "kl/forward"],
    "right answers": ["eval/exact_match"],
    "loss": ["loss"],
    "entropy": ["entropy", "teacher/entropy"],
    "length": ["completions/mean_length", "eval/length"],
}


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "distill.yaml")
    check_settings(args)
    # This also fills in output_dir and the size of micro-batches.
    accelerator = launch.make_accelerator(args, "distill")
    lora.complete_settings(accelerator, args)  # fills in lora_alpha

    # ============================================================ data
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.taught_row,
        max_new_tokens=args.max_new_tokens,
        teacher_names=teachers.names(args),
        teacher_prompt=args.teacher_prompt,
        with_completion=args.on_policy_share < 1,
    )
    preview.show(accelerator, args, data)  # with --preview: prints rows and exits
    check_completions(args, data)
    plan = RolloutSchedule(args, n_prompts=data.mixture.samples)
    progress = Progress(
        data.mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        updates_per_epoch=plan.updates_per_epoch,
    )

    # ============================================================ model and optimizer
    student = load.causal_lm(args.model_name_or_path, tokenizer, args)
    policy = DistillModel(student, teachers.shared_vocabulary(args, tokenizer, student))
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    optimizer = optim.adamw(accelerator, optim.parameter_groups(policy, args.weight_decay), args)
    scheduler = optim.scheduler(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="kl/reverse",
        bar_label="reverse_kl",
        charts=CHARTS,
        flop=lora.flop(policy),  # operations, for perf/mfu
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        tokenizer=tokenizer,
        data=data,
        model=model,
        unwrapped=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        progress=progress,
        metrics=metrics,
        models=lora.fingerprints(accelerator, policy),  # bases of adapters: a resume checks them
        extra=State(Position()),  # what the loop carries; saved in checkpoints
    )
    # Refuses a model whose architecture is not interpreted correctly.
    checks.check_logprobs(run, data.train[0]["prompt_ids"])
    vllm.connect(run)  # does nothing without --vllm_url

    # ============================================================ teachers
    all_teachers = Teachers(run)
    packer = checks.make_packer(run, [model, *all_teachers.models], args.share_prompts)

    # ============================================================ the loop
    state = checkpoint.begin(run)  # `run.extra`, which a resume replaces
    console.begin(
        run,
        data=f"{len(data.train)} rows; {packer.describe('their responses', each='response')}",
        updates=plan.describe(progress.total_steps),
    )
    guard = guards.FiniteLosses(run)  # ends the run if a loss is not finite
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    beta = beta_of(args)
    if progress.updates_seen == 0:
        evaluate(run, all_teachers, packer)
    while not progress.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, all_teachers, packer)
        rollout = state.rollout

        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = rows_of_update(rollout, state.position, args)
        update_tokens = int(rollout.samples.lengths[update_rows].sum())  # prompts and responses
        response_tokens = int(rollout.tokens["mask"][update_rows].sum())  # the loss is their mean
        # Sorting by these keeps a group together where its prompt can be shared.
        sort_lengths = rollout.samples.lengths_for_split(packer)
        micro_batches = batches.split_update(run, update_rows, sort_lengths)
        divisor = engine.begin_update(run, micro_batches)  # micro-batches x processes
        loss_scale = engine.loss_scale(run)  # for the log: the update may change it
        learning_rate = scheduler.get_last_lr()[0]
        student_has_moved = progress.global_step > rollout.started_at  # since it made the rollout

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                data_rows = [rollout.samples.data_rows[row] for row in micro_batch.rows]
                weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
                batch, stored = rollout.samples.collate(micro_batch.rows, rollout.tokens, packer)
            with metrics.timed("teacher"):  # what the teachers say about the same tokens
                lessons = lessons_of(
                    all_teachers, rollout, micro_batch.rows, batch=batch, packer=packer
                )

            with accelerator.accumulate(model):
                output = model(batch, args.temperature, lessons=lessons, beta=beta)
                if student_has_moved:
                    old = stored
                else:
                    # Which tokens were sampled. Those of the data's completions were not.
                    sampled = stored["mask"] * stored["is_own"] * weights[:, None]
                    metrics.pending.add(correction.sampler_differences(output, stored, sampled))
                    # The log-probs of this very pass are the old ones, so all ratios are exactly 1.
                    old = {**stored, "logps": output["logps"].detach()}
                losses, token_weights, logged = losses_and_metrics(output, old, weights, args)
                guard.check(data_rows, losses, token_weights, old=old, new=output)
                # Part of the mean over response tokens; the engine divides by `divisor`.
                loss = (losses * token_weights).sum() * divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act in the last micro-batch only.
                optimizer.step()
                optimizer.zero_grad()
            metrics.pending.add(logged)
            metrics.count_flop(batch, micro_batch.weights)

        applied = not accelerator.optimizer_step_was_skipped  # skipped: gradients overflowed
        progress.update_done(applied, samples=len(update_rows), tokens=update_tokens)
        metrics.update_done(
            applied, grad_norm=grad_norm, learning_rate=learning_rate, loss_scale=loss_scale
        )
        if applied:
            scheduler.step()
        advance_rollout(run)  # a skipped update has used up its samples, too

        log_evaluate_save(run, all_teachers, packer)

    actor.publish(run)
    metrics.close()
    console.end(run)
    hub.push(run)


def log_evaluate_save(run: Run, all_teachers: Teachers, packer: Packer) -> None:
    """Logs, evaluates and saves what is due, and ends the run if a signal asks for it."""
    args = run.args
    if run.progress.log_due(args.logging_steps):
        run.metrics.log()
    if run.progress.evaluation_due(args.eval_steps):
        evaluate(run, all_teachers, packer)
    if run.progress.save_due(args.save_steps):
        checkpoint.save(run)
    if run.progress.save_due(args.save_actor_steps):
        actor.publish_step(run)
    checkpoint.stop_if_asked(run)


# ============================================================ evaluation
def evaluate(run: Run, all_teachers: Teachers, packer: Packer) -> None:
    """Logs how the student answers held-out prompts, and how far it is from its teachers."""
    line = {}
    examples = []
    with run.metrics.timed("paused"):
        for prefix, eval_set in run.data.eval_sets.items():
            samples = evaluation.sample_held_out(run, eval_set)
            rollout = rollout_of(run, samples, eval_set[:], n_own=len(eval_set))
            del rollout.tokens["sampler_logps"]  # so that nothing is corrected for the sampler
            token_means = Means(run.accelerator)
            for _, weights, old, output in forward_passes(run, rollout, all_teachers, packer):
                old = {**old, "logps": output["logps"]}  # it has not moved: all ratios are 1
                _, _, logged = losses_and_metrics(output, old, weights, run.args)
                token_means.add(logged)
            line |= {prefix + name: value for name, value in token_means.reduce().items()}
            of_responses = evaluation.of_responses(run, samples, eval_set)  # lengths, whether right
            line |= evaluation.means(of_responses, prefix)
            examples += samples.examples(run.tokenizer, None, prefix.rstrip("/"))
    run.metrics.log_evaluation(line, examples)
    actor.keep_best(run, line)


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or cannot work."""
    teachers.names_and_paths(args)  # exits if none is named, or one twice
    evaluation.check_settings(args)
    vllm.check_settings(args)
    schedule.check_settings(args)
    if args.loss_type == "divergence":
        of_correction = ["sampler_correction", "sampler_correction_max"]
        refuse_changed(args, of_correction, "only --loss_type sampled is corrected")
    if args.loss_type == "sampled" and args.beta != 1:
        sys.exit(
            f"--beta {args.beta:g} --loss_type sampled: sampled tokens estimate the reverse KL "
            "alone. Take --beta 1, or --loss_type divergence"
        )
    if args.loss_type == "sampled" and args.on_policy_share < 1:
        sys.exit(
            f"--on_policy_share {args.on_policy_share:g} --loss_type sampled: the tokens of a "
            "completion were not drawn by the student. Take --loss_type divergence"
        )
    if args.on_policy_share < 1 and args.rollouts_ahead:
        sys.exit(
            f"--on_policy_share {args.on_policy_share:g} --rollouts_ahead 1: not supported "
            "together. Leave one of them out"
        )
    if args.on_policy_share < 1 and args.n_samples_per_prompt > 1:
        sys.exit(
            f"--n_samples_per_prompt {args.n_samples_per_prompt} --on_policy_share "
            f"{args.on_policy_share:g}: the data has one completion of a prompt, so the student "
            "answers once, too: give --n_samples_per_prompt 1"
        )


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
