"""What a run prints before its first update and after its last one, a block each."""

import shlex
import shutil
import sys
import time
from pathlib import Path

from huggingface_hub import HfApi
from tqdm import tqdm

from common import display, engine, log, one_line, optim, pluralize, refuse
from common.actor import BEST_FOLDER, ActorSaver
from common.checkpoint import Checkpoint
from common.record import relative


def print_start(checkpoint: Checkpoint, data: str, updates: str = "") -> None:
    """Prints what is trained on what, and how.

    Args:
        data: what the run learns from.
        updates: the arithmetic of its updates, where it is not that of a plain epoch.
    """
    run = checkpoint.run
    args = run.args
    module = checkpoint.saver.unwrapped
    size, trained = [count / 1e6 for count in engine.count_parameters(module)]
    processes = pluralize(run.accelerator.num_processes, "process")
    steps = pluralize(run.accelerator.gradient_accumulation_steps, "gradient accumulation step")
    division = f"= micro_train_batch_size {args.micro_train_batch_size} x {processes} x {steps}"
    if args.micro_train_tokens:
        division = f"in micro-batches of up to {args.micro_train_tokens} tokens on {processes}"
    last = (run.n_rows - 1) % run.train_batch_size + 1
    per_epoch = f"{run.n_rows} samples / train_batch_size {run.train_batch_size} = "
    per_epoch += f"{pluralize(run.updates_per_epoch, 'update')} per epoch, the last of {last}"
    warmup = optim.warmup_updates(args, run.total_steps)
    lines = [
        f"model     {args.model_name_or_path} ({type(module.model).__name__}), "
        f"{size:.4g} million parameters, {trained:.4g} million trained",
        f"data      {data}",
        f"updates   {updates or per_epoch}",
        f"schedule  learning rate {args.learning_rate:g}; {args.lr_scheduler_type}, "
        f"{pluralize(run.total_steps, 'update')}, {warmup} of them warm-up",
        f"update    train_batch_size {args.train_batch_size} {division}",
    ]
    display.write(*(f"  {line}" for line in lines))


def finish_run(saver: ActorSaver) -> None:
    """Ends trackers and bar, prints the result, uploads the model. All processes must call it."""
    run = saver.run
    run.bar.close()
    for tracker in run.accelerator.trackers:
        tracker.finish()
    if run.accelerator.device.type != "cpu":  # what uses gloo ends in `errors.run`
        run.accelerator.state.destroy_process_group()
    if not run.accelerator.is_main_process:
        return
    folder = run.output_dir / "actor"
    best = saver.best
    took = tqdm.format_interval(time.monotonic() - run.bar.began)
    updates = pluralize(run.global_step, "update")
    display.write(
        f"done: {updates}, {run.skipped_steps} skipped, took {took}; actor in {relative(folder)}",
        *(f"  {line}" for line in describe_result(saver)),
    )
    if best.value is not None:
        folder = run.output_dir / BEST_FOLDER
        kept = f"{run.args.keep_best} {best.value:.4g} at update {best.global_step}"
        print(f"best: {kept}, saved in {relative(folder)}")
    if run.args.push_to_hub:
        name = run.args.push_to_hub
        try:
            repository = HfApi().create_repo(name, private=True, exist_ok=True)
            HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
        except Exception as error:  # of the network, the name, the token
            command = shlex.join(["hf", "upload", "--private", name, relative(folder)])
            refuse(f"--push_to_hub {name}: {one_line(error)}. To repeat it: {command}")
        print(f"uploaded {folder} to {repository}", flush=True)


def describe_result(saver: ActorSaver) -> list[str]:
    """Returns lines: what was learned, and the commands that show the curves and load the model."""
    run = saver.run
    evaluations = log.evaluations(run.output_dir)
    metrics = [name for name in (evaluations or [{}])[-1] if display.direction(name)]
    width = max(map(len, metrics), default=0)
    lines = [f"{name:{width}}  {display.progress_of(name, evaluations)}" for name in metrics]
    is_default = run.args.learning_rate == getattr(type(run.args), "learning_rate", None)
    if run.global_step <= 3 and is_default:
        lines.append(
            f"NOTE: {pluralize(run.global_step, 'update')} at the default --learning_rate "
            f"{run.args.learning_rate:g} cannot have taught much. For a small set: "
            "--train_batch_size 4 --max_epochs 10 --learning_rate 1e-4"
        )
    if run.board:
        program = "tensorboard"
        if shutil.which(program) is None:  # the environment is not activated
            program = relative(Path(sys.executable).with_name(program))
        words = shlex.join([program, "--logdir", relative(run.output_dir)])
        lines.append(f"curves  {words}  and open {log.PAGE} (untick Ignore outliers)")
    model = saver.unwrapped.model
    kind = "CausalLM" if model.can_generate() else "SequenceClassification"
    folder = relative(run.output_dir / "actor")
    return [*lines, f'model   AutoModelFor{kind}.from_pretrained("{folder}")']
