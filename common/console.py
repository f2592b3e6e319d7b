"""What a run prints before its first update and after its last one, a block each."""

import re
import time
from pathlib import Path

from torch import nn
from tqdm import tqdm

from common import adapters, best, counted, engine, hub, optim, record, trackers
from common.actor import Actor
from common.checkpoint import Checkpoint
from common.run import Run


def begin(checkpoint: Checkpoint, data: str, updates: str = "", exact_match: str = "") -> None:
    """Prints what is trained on what, and how; once on each node. All processes may call it.

    Args:
        data: what the run learns from.
        updates: the arithmetic of its updates, where it is not that of a plain epoch.
        exact_match: what exact match takes in an evaluation; "" where there is none.
    """
    run = checkpoint.run
    if not run.accelerator.is_local_main_process:
        return
    args = run.args
    lines = {
        "model": describe_model(args, checkpoint.actor.unwrapped),
        "data": data,
        **scored_by(args),
        "updates": updates or run.progress.describe(),
        "schedule": optim.describe_schedule(args, run.total_steps, checkpoint.scheduler),
        "update": describe_update(run),
        "engine": engine.describe(run.accelerator),
        "output": f"{args.output_dir}: {', '.join(files_of(args, exact_match))}",
    }
    if args.keep_best:
        lines["best"] = f"{best.target(args.keep_best).describe()}: {args.output_dir}/{best.FOLDER}"
    if args.eval_dataset_name is None:
        lines["held out"] = "nothing: give --eval_dataset_name to see more than the training loss"
    if exact_match:
        lines["exact match"] = exact_match
    if args.save_steps:
        every = counted(run.progress.updates_in(args.save_steps), "update")
        lines["checkpoints"] = f"{checkpoint.folder}, one every {every}"
    else:
        lines["checkpoints"] = "none but when a signal ends the run; give --save_steps for others"
    if "tensorboard" in args.report_to:
        lines["curves"] = (
            f"tensorboard --logdir {args.output_dir}; the key ones are at {trackers.KEY_CHARTS}"
        )
    width = max(len(title) for title in lines)
    rows = [f"  {title:{width}}  {text}" for title, text in lines.items()]
    run.logger.bar.write("\n".join(rows))  # above the bar


def scored_by(args) -> dict[str, str]:
    """Returns what scores or teaches a run's responses, if something does."""
    scorers = [getattr(args, "reward_model_name_or_path", None)]
    scorers += getattr(args, "reward_function", None) or []
    scorers += [getattr(args, "environment", None)]
    given = [scorer for scorer in scorers if scorer]
    if given:
        return {"scored by": ", ".join(given)}
    teachers = getattr(args, "teacher", None) or [getattr(args, "teacher_model_name_or_path", None)]
    named = [teacher for teacher in teachers if teacher]
    return {"taught by": ", ".join(named)} if named else {}


def files_of(args, exact_match: str) -> list[str]:
    """Returns what a run writes into its folder, except checkpoints and curves."""
    if exact_match or hasattr(args, "rollout_batch_size"):
        return ["metrics.jsonl", "samples.jsonl", "actor/"]
    return ["metrics.jsonl", "actor/"]


def describe_model(args, module: nn.Module) -> str:
    """Returns name, architecture, size and dtype of the model that is trained."""
    total = engine.count_parameters(module)
    trained = engine.count_trained_parameters(module)
    share = "all trained" if trained == total else f"{trained / 1e6:.4g} million trained"
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    packed = ", those of the base packed into 4 bits" if args.load_in_4bit else ""
    critic = " with the critic's" if hasattr(module, "critic") else ""
    return (
        f"{args.model_name_or_path} ({type(module.model).__name__}), "
        f"{total / 1e6:.4g} million parameters{critic}, {share}, weights in {dtype}{packed}"
    )


def describe_update(run: Run) -> str:
    """Returns how the samples of an update are divided."""
    args = run.args
    processes = counted(run.accelerator.num_processes, "process")
    if args.micro_train_tokens:
        division = f"in micro-batches of up to {args.micro_train_tokens} tokens on {processes}"
    else:
        steps = counted(run.accelerator.gradient_accumulation_steps, "gradient accumulation step")
        division = f"= micro_train_batch_size {args.micro_train_batch_size} x {processes} x {steps}"
    return f"train_batch_size {args.train_batch_size} {division}"


def end(actor: Actor, is_chat: bool = True) -> None:
    """Closes the log, prints the result and how to use the model, uploads it (`--push_to_hub`).

    All processes must call it.

    Args:
        is_chat: whether the training data are conversations, not plain strings.
    """
    run = actor.run
    run.logger.close()
    if not run.accelerator.is_main_process:
        return
    time_taken = tqdm.format_interval(time.monotonic() - run.logger.started)
    folder = run.output_dir / "actor"
    best_folder = folder.with_name(best.FOLDER)
    updates = counted(run.global_step, "update")
    if not run.global_step:
        updates += " (the model is as it was)"
    shown = best_folder if best_folder.is_dir() else folder
    lines = [
        f"done: {updates}, {run.progress.skipped_steps} skipped, took {time_taken}; "
        f"{what_is_saved(actor.unwrapped)} in {folder}",
        *before_and_after(run.output_dir, run.logger.charts),
        *actor.best.describe_end(),
        "load it and try it:",
        *how_to_load(actor.unwrapped, shown, is_chat),
    ]
    print("\n".join(lines), flush=True)
    hub.push(run.args, best_folder if run.args.keep_best else folder)


def what_is_saved(module: nn.Module) -> str:
    """Returns what the folder `actor` holds, in words."""
    kind = "reward model" if is_classifier(module) else "actor"
    return f"{kind}'s adapter" if adapters.has_adapter(module) else kind


def is_classifier(module: nn.Module) -> bool:
    """Whether the model that is trained scores texts and does not write any."""
    return "ForSequenceClassification" in type(module.model).__name__


def before_and_after(output_dir: Path, charts: dict[str, list[str]]) -> list[str]:
    """Returns the key metrics of the first and the last evaluation; without any, of training.

    Lines of training are not called before and after, because each is about other samples. Empty if
    the first is the last.
    """
    ends = record.ends_of_log(output_dir)
    shown = ends.evaluations or ends.lines
    titles = ("before", "after") if ends.evaluations else ("first line", "last line")
    if not shown or shown[0] == shown[1]:
        return []
    patterns = [trackers.pattern_of(tags) for tags in charts.values()]
    figures = [
        (name, before, after)
        for name, before, after in record.compared(shown)
        if any(re.match(pattern, name) for pattern in patterns)
    ]
    width = max([len(name) for name, _, _ in figures], default=0)
    return [
        f"  {name:{width}}  {before:>10}  {after:>10}"
        for name, before, after in [("", *titles), *figures]
    ]


def how_to_load(module: nn.Module, folder: Path, is_chat: bool) -> list[str]:
    """Returns how to load the model and use it as it was trained: on messages, or on strings.

    They are lines of Python; for a reward model they name the page that has them.
    """
    if is_classifier(module):
        lines = ["  see docs/reward.md, The saved model"]
        if adapters.has_adapter(module):
            lines.insert(
                0, f"  python -m preference_recipes.tools.export {folder} {folder}_merged --merge"
            )
        return lines
    question = '[{"role": "user", "content": "..."}]' if is_chat else '"text"'
    return [
        "  from transformers import pipeline",
        f'  generate = pipeline("text-generation", "{folder}")',
        f"  print(generate({question}, max_new_tokens=100, do_sample=False))",
    ]
