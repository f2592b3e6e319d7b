# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""On-policy distillation: a student answers, and learns what its teacher would have said.

Agarwal et al. 2023, arXiv:2306.13649 (GKD); for the loss of sampled tokens Lu et al. 2025,
https://thinkingmachines.ai/blog/on-policy-distillation. The run makes one rollout after another:

    1. sample the student's responses to prompts                            make_rollout
    2. updates of train_batch_size samples, which the teachers read, too    token_losses

    loss = mean over all response tokens of KL(s || t), or of another divergence by --beta

where s and t are the student's and the teacher's distribution of a token, given those before it.

Shapes: N samples of a rollout, T tokens in the longest response. What belongs to tokens is [N, T],
and zero past the end of a response; or [N, 1] if all tokens have the same. An update reads some of
the N rows. Completions of the data in place of some responses: forks/README.md.

The demo, offline:
    python recipes/distill.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/distill.py --model_name_or_path M --dataset_name D --teacher_model_name_or_path T

Every metric: docs/distill.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

import numpy as np
import torch

import preference_recipes  # noqa: F401  makes `common` ours, whatever else has that name
from common import Refused, arguments, carried, console, errors, launch, optim, refuse
from common.actor import Actor
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import SchedulerType, arg
from preference_recipes.data import dataset, prompts
from preference_recipes.models import checks, cost, load, prepare, teachers
from preference_recipes.models.divergence import DistillModel, Lesson
from preference_recipes.models.packing import Packer
from preference_recipes.models.teachers import Question
from preference_recipes.rollouts import correction, results, rollout
from preference_recipes.rollouts.args import RolloutArgs
from preference_recipes.rollouts.rollout import Rollout, State
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.rollouts.served import AllTeachers
from preference_recipes.tools.preview import show_preview


# ============================================================ arguments
@dataclass
class Args(RolloutArgs):
    teacher_model_name_or_path: str | None = arg(
        None, "the model to learn from: a hub name or a folder"
    )
    teacher: list[str] | None = arg(
        None, "several teachers, NAME=PATH each; the column `teacher` names a row's own"
    )
    teacher_url: list[str] | None = arg(None, "vLLM servers of a teacher, or NAME=URL each")
    teacher_top_k: int = arg(64, "tokens that a server tells", only_with="teacher_url", at_least=1)
    teacher_prompt: str | None = arg(None, "column with the teacher's prompt")
    loss_type: Literal["divergence", "sampled"] = arg(
        "divergence", "over the vocabulary, or a policy gradient on sampled tokens"
    )
    beta: float = arg(
        1.0,
        "1: KL(student || teacher); 0: the other way round; between: Jensen-Shannon",
        at_least=0,
        at_most=1,
    )
    max_new_tokens: int = arg(1024, "longest response", at_least=1)
    train_batch_size: int = arg(128, "samples of one update", at_least=1)
    max_length: int = arg(2048, "tokens of prompt and --max_new_tokens together", at_least=2)
    lr_scheduler_type: SchedulerType = arg("constant_with_warmup", "a schedule of transformers")

    may_change: ClassVar[set[str]] = RolloutArgs.may_change | {"teacher_url"}


# ============================================================ the algorithm
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
    is_first: bool,
    in_training: bool = True,
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of response tokens `[rows, T]`, and values to log about them.

    Args:
        lessons: what the teachers say of the batch.
        stored: `Rollout.stored` of the same samples.
        is_first: whether no update was applied since the rollout was made. Then the log-probs of
            this very pass are the old ones, so all ratios are exactly 1.
        in_training: False in an evaluation, which does not ask who drew the tokens.
    """
    is_sampled = args.loss_type == "sampled"
    beta = None if is_sampled else args.beta  # None: no divergence, but log-probs to learn from
    output = model(batch, args.temperature, lessons=lessons, beta=beta)
    logps = output["logps"]
    mask = stored["mask"]
    values = {}
    if is_sampled:
        old_logps = logps.detach() if is_first else stored["logps"]
        losses = sampled_losses(logps, old_logps, output["teacher_logps"])
        if in_training:  # where a server sampled, its log-probs differ from those of training
            losses, values = correction.weighted(losses, old_logps, stored, args, is_first)
    else:
        losses = output["divergence"]
        if in_training and is_first:
            # It needs no weight: its gradient does not depend on how a token was drawn.
            values = correction.sampler_differences(logps, stored["sampler_logps"], mask)
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


# ============================================================ the rollout
@carried
@dataclass
class TaughtRollout(Rollout):
    """A rollout, and what its teachers need to know.

    `stored` are `mask sampler_logps`, `logps` if later updates need them, and `teacher`, the number
    of each sample's teacher.
    """

    teachers: list[str]  # the name of each sample's teacher
    teacher_prompts: list[list[int]]  # what its teacher reads before the response
    top_logps: list | None = None  # see `AllTeachers.top_logps`; None: not asked yet

    def as_read(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the samples' lengths `[N]`, with the longer prompt: student's or teacher's.

        It adds the same to all samples of a prompt, so they stay side by side where they are.
        """
        prompts = zip(self.samples.prompts, self.teacher_prompts)
        return lengths + [max(len(taught) - len(own), 0) for own, taught in prompts]

    @property
    def questions(self) -> list[Question]:
        """What the teacher of each sample is asked."""
        answers = (self.samples.responses, self.samples.is_sampled)
        return list(map(Question, self.teachers, self.teacher_prompts, *answers))

    def lessons(
        self, all_teachers: AllTeachers, rows: list[int], batch: dict, packer: Packer
    ) -> list[Lesson]:
        """Returns a lesson of each teacher of these samples; `batch` is what the student reads."""
        questions = self.questions
        asked = [questions[row] for row in rows]
        return all_teachers.lessons(batch, asked, [self.top_logps[row] for row in rows], packer)


def make_rollout(run: Run, sampler: Sampler, state: State) -> TaughtRollout:
    """Samples responses of the student, and notes who teaches each of them."""
    args = run.args
    columns = state.position.take_prompts(sampler, args.rollout_batch_size)
    with run.timed("generate"):
        samples = sampler.sample_rollout(state.position, columns)
    values = {
        "completions/mean_length": samples.mask.sum(1),
        "completions/clipped_ratio": ~samples.ended,
    }
    results.log_responses(sampler, samples, None, "completions", values)
    run.write_samples(samples.examples(sampler.tokenizer, None, "rollout"))
    made = taught(run, samples, columns)
    if args.loss_type == "sampled" and made.n_updates(args) > 1:
        # The first update takes the log-probs of its own pass as the old ones, later ones these.
        with run.timed("score"):
            made.stored |= rollout.compute_logps(sampler, samples, ("logps",), reference=None)
            samples.check_finite(sampler, logps=made.stored["logps"])
    return made


def taught(run: Run, samples: Samples, columns: dict) -> TaughtRollout:
    """Returns the rollout of some samples: adds who teaches each, and what that teacher reads.

    Args:
        columns: of their prompts, each once.
    """
    # With several teachers, the data name each row's.
    one_teacher = [teachers.ONLY] * len(columns["row"])
    names = repeat_each(columns.get("teacher", one_teacher), samples.per_prompt)
    # Without --teacher_prompt a teacher reads what the student reads.
    prompts_of_teachers = columns.get("teacher_prompt_ids", columns["prompt_ids"])
    known = list(teachers.locations(run.args))
    stored = {"mask": samples.mask, "sampler_logps": samples.padded_sampler_logps}
    stored["teacher"] = torch.tensor([[known.index(name)] for name in names])
    return TaughtRollout(
        samples,
        run.global_step,
        stored,
        is_trained=torch.ones(len(samples), dtype=torch.bool),
        teachers=names,
        teacher_prompts=repeat_each(prompts_of_teachers, samples.per_prompt),
    )


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "KL to the teacher": ["kl/reverse", "kl/forward"],
    "right answers": ["eval/exact_match"],
    "loss": ["loss"],
    "entropy": ["entropy", "teacher/entropy"],
    "length": ["completions/mean_length", "eval/length"],
}


def load_prompts(accelerator, args: Args, tokenizer) -> dataset.Data:
    """Returns the prompts, and those of the teachers where the arguments name them."""
    return dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.taught_row,
        max_new_tokens=args.max_new_tokens,
        teacher_names=teachers.names(args),
        teacher_prompt=args.teacher_prompt,
    )


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="distill.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "distill")  # it also makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = load_prompts(accelerator, args, tokenizer)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits

    student = load.causal_lm(args.model_name_or_path, tokenizer, args)
    policy = DistillModel(student, teachers.shared_vocabulary(args, data, student))
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    state = State()  # where the run is in its prompts, and its rollout
    run = Run(
        accelerator,
        args,
        len(data.train),
        flop=cost.flop(policy),
        bar_metric="kl/reverse",
        charts=CHARTS,
        updates_per_epoch=rollout.n_updates(args, len(data.train)),
    )
    optimizer = optim.build(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    checks.check_logprobs(accelerator, model, data.train[0]["prompt_ids"])

    all_teachers = AllTeachers(accelerator, args, tokenizer, model)
    models = [model, *(teacher.model for teacher in all_teachers.by_name.values())]
    packer = checks.make_packer(
        accelerator, models, max_length=args.max_length, share=args.share_prompts
    )
    means = Means(accelerator, run.recorder("rollout"))
    sampler = Sampler(accelerator, args, tokenizer, model, data, run, means, packer)
    actor = Actor(run, model, tokenizer)
    fixed = [data, policy, all_teachers]  # a resumed run must have the same
    checkpoint = Checkpoint(
        run, actor, optimizer, scheduler, means, fixed=fixed, rollout=state, ahead=sampler.generator
    )
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.begin(
        checkpoint,
        data=f"{len(data.train)} rows; {packer.describe()}",
        updates=rollout.describe_updates(args, run),
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        evaluate(run, actor, sampler, all_teachers)
    while not run.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, sampler, state)
        if state.rollout.top_logps is None:
            try:
                with run.timed("teacher"):  # the student's servers sample the next one meanwhile
                    state.rollout.top_logps = all_teachers.top_logps(state.rollout.questions)
            except Refused:
                if run.global_step:
                    checkpoint.save()  # with what was sampled: a resumed run asks again
                raise
        samples = state.rollout.samples
        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = state.rollout.rows_of_update(state.position, args)
        # Sorted by these lengths a group stays together where its prompt can be shared.
        lengths = state.rollout.as_read(samples.lengths_for_split(packer))
        update = run.update_of(update_rows, lengths, state.rollout.n_tokens(update_rows))
        # The loss is the mean over these tokens.
        response_tokens = int(state.rollout.stored["mask"][update_rows].sum())
        is_first = run.global_step == state.rollout.started_at
        for rows, weights in update.micro_batches:
            with run.timed("data"):
                batch, stored = samples.collate(rows, state.rollout.stored, packer)
                data_rows = [samples.data_rows[row] for row in rows]
                token_weights = stored["mask"] * weights[:, None]
            with run.timed("teacher"):  # what the teachers say about the same tokens
                lessons = state.rollout.lessons(all_teachers, rows, batch, packer)
            with accelerator.accumulate(model):
                losses, values = token_losses(model, batch, lessons, stored, args, is_first)
                run.check_finite(update, data_rows, losses, token_weights, stored)
                # This micro-batch's part of the mean over tokens. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * token_weights).sum() * update.engine_divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(values, weights, data_rows, samples.numbers(rows))
            run.count_flop(batch, weights)

        applied = run.finish_update(update, grad_norm)  # False: its gradients overflowed
        latest = dict(learning_rate=scheduler.get_last_lr()[0], loss_scale=update.loss_scale)
        means.close_update(applied, grad_norm=grad_norm, **latest)
        if applied:
            scheduler.step()
        state.advance(args)  # a skipped update has used up its samples, too

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce_and_reset())
        if run.due(args.eval_steps):
            evaluate(run, actor, sampler, all_teachers)
        actor.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce_and_reset())  # what is in no line yet
    actor.save()
    console.end(actor)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, actor: Actor, sampler: Sampler, all_teachers: AllTeachers) -> None:
    """Logs how the student answers held-out prompts, and how far it is from its teachers."""
    packer = sampler.packer
    line = {}
    examples = []
    with run.timed("paused"), checks.evaluation_mode(actor.model):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = sampler.sample_held_out(eval_set)
            made = taught(run, samples, eval_set[:])
            made.top_logps = all_teachers.top_logps(made.questions)
            means = Means(run.accelerator, run.recorder(prefix))
            for rows, weights in run.split(range(len(samples)), made.as_read(samples.lengths)):
                batch, stored = samples.collate(rows, made.stored, packer)
                lessons = made.lessons(all_teachers, rows, batch, packer)
                _, values = token_losses(
                    actor.model, batch, lessons, stored, run.args, is_first=True, in_training=False
                )
                data_rows = [samples.data_rows[row] for row in rows]
                means.add(values, weights, data_rows, samples.numbers(rows))
            line |= {prefix + name: value for name, value in means.reduce_and_reset().items()}
            values, shown = results.held_out_results(sampler, samples, None, eval_set, prefix)
            line |= values
            examples += shown
    run.log_evaluation(line, examples)
    actor.keep_best(line)  # may end the run, see --stop_after


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that contradict each other."""
    teachers.check_settings(args)  # exits if none is named, or one twice
    rollout.check_rollout_size(args)
    if args.loss_type == "sampled" and args.beta != 1:
        refuse(
            f"--beta {args.beta:g} --loss_type sampled: sampled tokens estimate the reverse KL "
            "alone. Take --beta 1, or --loss_type divergence"
        )
    for name in ("sampler_correction", "sampler_correction_max"):
        if args.loss_type == "divergence" and getattr(args, name) != getattr(Args, name):
            refuse(f"--{name} {getattr(args, name)}: only --loss_type sampled is corrected")


if __name__ == "__main__":
    errors.run(main)
