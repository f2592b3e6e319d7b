# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""On-policy distillation: a student answers, and learns what its teacher would have said.

Agarwal et al. 2023, arXiv:2306.13649 (GKD); for the loss of sampled tokens Lu et al. 2025,
https://thinkingmachines.ai/blog/on-policy-distillation. The run makes one rollout after another:

    1. sample the student's responses to prompts                            make_rollout
    2. updates of train_batch_size samples, which the teachers read, too    token_losses

    loss = mean over all response tokens of a divergence, by --beta

where s and t are the student's and the teacher's distribution of a token, given those before it,
and m = (1 - beta) s + beta t:

    beta = 1        KL(s || t), the reverse KL
    beta = 0        KL(t || s), the forward KL
    0 < beta < 1    beta KL(t || m) + (1 - beta) KL(s || m), generalised Jensen-Shannon

Shapes: N samples of a rollout, T tokens in the longest response. What belongs to tokens is [N, T],
and zero past the end of a response; or [N, 1] if all tokens have the same. An update reads some of
the N rows. `token_outputs` sees n of their tokens at a time, with all V of the vocabulary.

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
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

import torch

import preference_recipes  # noqa: F401  so that `common` is this package's
from common import arguments, console, errors, launch, optim, refuse
from common.actor import ActorSaver
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import SchedulerType, arg
from preference_recipes.data import dataset
from preference_recipes.data.prompts import distill_row
from preference_recipes.models import checks, cost, load, prepare, teachers
from preference_recipes.models.distillation import DistillModel
from preference_recipes.rollouts import correction, results, rollout_state
from preference_recipes.rollouts.args import RolloutArgs
from preference_recipes.rollouts.rollout_state import RolloutState
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.teaching import AllTeachers, TaughtRollout
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
    teacher_top_k: int = arg(64, "tokens a server returns", only_with="teacher_url", at_least=1)
    teacher_prompt: str | None = arg(None, "column with the teacher's prompt")
    loss_type: Literal["divergence", "sampled"] = arg(
        "divergence", "over the vocabulary, or a policy gradient on sampled tokens"
    )
    beta: float = arg(
        1.0,
        "1: KL(student || teacher); 0: the other way round; between: Jensen-Shannon",
        only_with="loss_type=divergence",
        at_least=0,
        at_most=1,
    )
    max_new_tokens: int = arg(1024, "longest response", at_least=1)
    train_batch_size: int = arg(128, "samples of one update", at_least=1)
    max_length: int = arg(2048, "tokens of prompt and --max_new_tokens together", at_least=2)
    lr_scheduler_type: SchedulerType = arg("constant_with_warmup", "how it goes after the warm-up")

    may_change: ClassVar[set[str]] = RolloutArgs.may_change | {"teacher_url"}


# ============================================================ the algorithm
def token_outputs(
    student_logps: torch.Tensor, teacher_logps: torch.Tensor, targets: torch.Tensor, args: Args
) -> dict[str, torch.Tensor]:
    """Returns metrics of each token by name, `[n]`: `objective`, which has a gradient, then others.

    That is the divergence of arXiv:2306.13649 eq. 1 or, with `--loss_type sampled`, the student's
    log-prob of the token. Only a chunk of an update's tokens is compared at a time.

    Args:
        student_logps, teacher_logps: of all tokens of the vocabulary, `[n, V]`.
        targets: the tokens of the response, `[n]`.
    """
    p_student = student_logps.exp()
    p_teacher = teacher_logps.exp()
    log_ratios = student_logps - teacher_logps
    metrics = {
        "reverse_kl": (p_student * log_ratios).sum(-1),
        "forward_kl": -(p_teacher * log_ratios).sum(-1),
        "entropy": -(p_student * student_logps).sum(-1),
        "teacher_entropy": -(p_teacher * teacher_logps).sum(-1),
        "agreement": (student_logps.argmax(-1) == teacher_logps.argmax(-1)).float(),
        "logps": student_logps.gather(1, targets[:, None]).squeeze(1),
        "teacher_logps": teacher_logps.gather(1, targets[:, None]).squeeze(1),
    }
    if args.loss_type == "sampled":
        objective = metrics["logps"]
    elif args.beta == 1:
        objective = metrics["reverse_kl"]
    elif args.beta == 0:
        objective = metrics["forward_kl"]
    else:
        student_log_ratios, teacher_log_ratios = log_ratios_to_mixture(log_ratios, args.beta)
        objective = args.beta * (p_teacher * teacher_log_ratios).sum(-1)
        objective += (1 - args.beta) * (p_student * student_log_ratios).sum(-1)
    return {"objective": objective, **metrics}


def log_ratios_to_mixture(
    log_ratios: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log s - log m and log t - log m, of log s - log t; all zero where s is t.

    Nothing overflows if S is the smaller of the two, L the larger, and w the weight of S in m:
    log m = log L + log(1 + w (S/L - 1)).
    """
    weight_of_smaller = torch.full_like(log_ratios, 1 - beta).masked_fill_(log_ratios > 0, beta)
    shift = torch.log1p(weight_of_smaller * torch.expm1(-log_ratios.abs()))  # log m - log L
    return log_ratios.clamp(max=0) - shift, -log_ratios.clamp(min=0) - shift


def objective_gradient(
    student_logps: torch.Tensor, teacher_logps: torch.Tensor, targets: torch.Tensor, args: Args
) -> torch.Tensor:
    """Returns the gradient of `objective` by the student's logits, `[n, V]`; see `token_outputs`.

    It is s - t at beta 0, and s (g - sum of s g) at beta 1, with g = log s - log t. In between g is
    (1 - beta) (log s - log m): the derivatives through m cancel. It is written by hand because
    autograd would keep `[n, V]` tensors of all chunks.
    """
    p_student = student_logps.exp()
    if args.loss_type == "sampled":  # one_hot(target) - s
        ones = torch.ones_like(p_student[:, :1])
        return p_student.neg_().scatter_add_(1, targets[:, None], ones)
    if args.beta == 0:
        return p_student.sub_(teacher_logps.exp())
    log_ratios = student_logps - teacher_logps
    if args.beta < 1:
        log_ratios, _ = log_ratios_to_mixture(log_ratios, args.beta)
    mean = (p_student * log_ratios).sum(-1, keepdim=True)
    return log_ratios.sub_(mean).mul_(p_student).mul_(1 if args.beta == 1 else 1 - args.beta)


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
    teacher_outputs: list,
    experience: dict,
    args: Args,
    is_first_update: bool = True,
    in_training: bool = True,
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of response tokens `[samples, T]`, and their metrics.

    Args:
        teacher_outputs: what the teachers say of the batch, from `AllTeachers.outputs_for`.
        experience: `Rollout.experience` of the same samples.
        is_first_update: whether no update of the rollout was applied yet. Then the log-probs of
            this very pass are the old ones, so all ratios are exactly 1.
        in_training: False in an evaluation, where no losses are weighted.
    """
    # The model calls both functions on a chunk of tokens at a time: all `[T, V]` would not fit.
    output = model(
        batch,
        args.temperature,
        teacher_outputs=teacher_outputs,
        token_outputs=partial(token_outputs, args=args),
        objective_gradient=partial(objective_gradient, args=args),
    )
    mask = experience["loss_mask"]
    metrics = {}
    if args.loss_type == "divergence":
        losses = output["objective"]
        if in_training and is_first_update:
            # It needs no weight: its gradient does not depend on how a token was drawn.
            sampler_logps = experience["sampler_logps"]
            metrics = correction.sampler_differences(output["logps"], sampler_logps, mask)
    else:
        logps = output["objective"]  # the one output with a gradient
        old_logps = logps.detach() if is_first_update else experience["old_logps"]
        losses = sampled_losses(logps, old_logps, output["teacher_logps"])
        if in_training:  # where a server sampled, its log-probs differ from those of training
            losses, metrics = correction.for_sampler(
                losses, old_logps, experience, args, is_first_update
            )
    metrics |= {
        "loss": (losses, mask),
        "kl/reverse": (output["reverse_kl"], mask),
        "kl/forward": (output["forward_kl"], mask),
        "entropy": (output["entropy"], mask),
        "teacher/entropy": (output["teacher_entropy"], mask),
        "teacher/agreement": (output["agreement"], mask),
    }
    for number, name in enumerate(teachers.names(args)):  # none if one teacher has all rows
        is_taught_by = experience["teacher_index"] == number
        metrics[f"kl/reverse/{name}"] = (output["reverse_kl"], mask * is_taught_by)
    return losses, metrics


# ============================================================ the rollout
def make_rollout(
    run: Run, sampler: Sampler, all_teachers: AllTeachers, state: RolloutState
) -> TaughtRollout:
    """Samples responses of the student, and notes who teaches each of them."""
    args = run.args
    prompts = state.take_prompts(sampler.data.train, args.seed, args.rollout_batch_size)
    with run.timed("generate"):
        samples = sampler.sample_rollout(state, prompts)
    metrics = {
        "completions/mean_length": samples.padded_loss_mask.sum(1),
        "completions/clipped_ratio": ~samples.ended,
    }
    results.add_rollout_metrics(sampler, samples, None, "completions", metrics)
    run.write_samples(samples.examples(sampler.tokenizer, None, "rollout"))
    rollout = all_teachers.assign_teachers(samples, prompts, run.global_step)
    if args.loss_type == "sampled" and rollout.n_updates(args) > 1:
        # The first update takes the log-probs of its own pass as the old ones, later ones these.
        with run.timed("score"):
            rollout.experience |= samples.compute_outputs(sampler, ("logps",), reference=None)
    return rollout


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "KL to the teacher": ["kl/reverse", "kl/forward"],
    "right answers": ["eval/exact_match"],
    "loss": ["loss"],
    "entropy": ["entropy", "teacher/entropy"],
    "length": ["completions/mean_length", "eval/length"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="distill.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "distill")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    settings = teachers.row_settings(args)
    data = dataset.load_data(accelerator, args, tokenizer, function=distill_row, **settings)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits

    policy = DistillModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    policy.vocab_size = teachers.shared_vocab_size(args, data, policy)
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    state = RolloutState()  # where the run is in its prompts, and its rollout
    run = Run(
        accelerator,
        args,
        len(data.train),
        flop=cost.flop(policy),
        bar_metric="kl/reverse",
        charts=CHARTS,
        updates_per_epoch=rollout_state.count_updates(args, len(data.train)),
    )
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)

    all_teachers = AllTeachers(accelerator, args, tokenizer, model)
    models = [model, *(teacher.model for teacher in all_teachers.by_name.values())]
    packer = checks.make_packer(accelerator, args, models)
    means = Means(accelerator, run.recorder("rollout", model))
    sampler = Sampler(run, model, tokenizer, data, packer, means)
    saver = ActorSaver(run, model, tokenizer)
    must_match = [data, policy, all_teachers]  # a resumed run must have the same
    checkpoint = Checkpoint(
        run, saver, optimizer, scheduler, means, must_match, rollout=state, sampler=sampler
    )
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(data.train)} rows; {packer.describe()}",
        updates=rollout_state.describe_updates(args, run),
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, sampler, all_teachers))
    while not run.finished:
        state.rollout = state.rollout or make_rollout(run, sampler, all_teachers, state)
        with run.timed("teacher"):  # the student's servers sample the next one meanwhile
            all_teachers.query_servers(state.rollout, on_failure=checkpoint.save)
        samples = state.rollout.samples
        # All processes agree on the samples of this update. Each takes its share of them.
        update_indices = state.rollout.next_indices(state, args)
        # Sorted by these lengths a group stays together where its prompt can be shared.
        lengths = state.rollout.lengths_as_read(samples.lengths_for_split(packer))
        update = run.plan_update(update_indices, lengths, samples.n_tokens(update_indices))
        # The loss is the mean over these tokens.
        response_tokens = int(state.rollout.experience["loss_mask"][update_indices].sum())
        is_first_update = run.global_step == state.rollout.step_at_start
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                batch, experience = samples.collate(indices, state.rollout.experience, packer)
                row_numbers = [samples.row_numbers[index] for index in indices]
                token_weights = experience["loss_mask"] * sample_weights[:, None]
            with run.timed("teacher"):  # what the teachers say about the same tokens
                outputs = all_teachers.outputs_for(state.rollout, indices, batch, packer)
            with accelerator.accumulate(model):
                losses, metrics = token_losses(
                    model, batch, outputs, experience, args, is_first_update
                )
                run.check_finite(update, row_numbers, losses, token_weights, experience)
                # This micro-batch's part of the mean over tokens. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * token_weights).sum() * update.engine_divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(metrics, sample_weights, row_numbers, samples.response_numbers(indices))
            run.count_flop(batch, sample_weights)

        applied = run.finish_update(update, grad_norm)  # False: its gradients overflowed
        rate = scheduler.get_last_lr()[0]
        means.close_update(applied, update, grad_norm=grad_norm, learning_rate=rate)
        if applied:
            scheduler.step()
        state.advance(args)  # a skipped update has used up its samples, too

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce_and_reset())
        if run.due(args.eval_steps):
            saver.save_if_best(evaluate(run, sampler, all_teachers))
        saver.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce_and_reset())  # updates since the last log line
    saver.save()
    console.finish_run(saver)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, sampler: Sampler, all_teachers: AllTeachers) -> dict[str, float]:
    """Logs how the student answers held-out prompts, and how far it is from its teachers."""
    eval_metrics = {}
    examples = []
    with run.timed("excluded"), prepare.evaluation_mode(sampler.model):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = sampler.sample_held_out(eval_set)
            rollout = all_teachers.assign_teachers(samples, eval_set[:], run.global_step)
            all_teachers.query_servers(rollout)
            means = Means(run.accelerator, run.recorder(prefix))
            lengths = rollout.lengths_as_read(samples.lengths)
            for indices, sample_weights in run.split(range(len(samples)), lengths):
                batch, experience = samples.collate(indices, rollout.experience, sampler.packer)
                outputs = all_teachers.outputs_for(rollout, indices, batch, sampler.packer)
                _, metrics = token_losses(
                    sampler.model, batch, outputs, experience, run.args, in_training=False
                )
                row_numbers = [samples.row_numbers[index] for index in indices]
                means.add(metrics, sample_weights, row_numbers, samples.response_numbers(indices))
            eval_metrics |= {prefix + tag: value for tag, value in means.reduce_and_reset().items()}
            metrics, shown = results.held_out_results(sampler, samples, None, eval_set, prefix)
            eval_metrics |= metrics
            examples += shown
    run.log_evaluation(eval_metrics, examples)
    return eval_metrics


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that contradict each other."""
    teachers.check_settings(args)  # exits if none is named, or one twice
    rollout_state.check_rollout_size(args)
    for name in ("sampler_correction", "sampler_correction_max"):
        if args.loss_type == "divergence" and getattr(args, name) != getattr(Args, name):
            refuse(f"--{name} {getattr(args, name)}: only --loss_type sampled is corrected")


if __name__ == "__main__":
    errors.run(main)
