"""Signals of what a run forks; what a resumed run cannot read, and what a killed one leaves behind."""

import math
import shutil
import types

import pytest
import torch
from accelerate.utils import DistributedType

from common import arguments, folders, stopping
from common.checkpoint import Checkpoint
from common.progress import Progress
from runs import LAUNCHERS, launch, refuses
from small_run import small_run


@pytest.mark.parametrize(
    "launched, stage, precision",
    [
        ("ZeRO-2 fp16 on cuda, 8 processes", 3, "fp16"),  # other files
        ("ZeRO-2 bf16 on cuda, 8 processes", 2, "fp16"),  # no loss scale
        ("ZeRO-2 fp16 on cuda, 80 processes", 2, "fp16"),  # other shards
    ],
)
def test_a_world_that_cannot_read_a_checkpoint_is_refused(tmp_path, launched, stage, precision):
    plugin = types.SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    made = small_run(tmp_path, beta=1)
    made.run.accelerator = types.SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        num_processes=8,
        mixed_precision=precision,
        device=torch.device("cuda"),
        state=types.SimpleNamespace(deepspeed_plugin=plugin),
    )
    checkpoint = Checkpoint(made.run, made.saver, None, None, made.means, must_match=[])
    before = {**checkpoint.identity, "launched as": f"DeepSpeed {launched}"}
    call = lambda: checkpoint.check_same_run(tmp_path, before)
    now = f"DeepSpeed ZeRO-{stage} {precision} on cuda, 8 processes"
    said = f"another run: launched as: 'DeepSpeed {launched}' in the checkpoint, {now!r} now"
    refuses(said, call=call)


# No rate, size of an update, seed or adapter: they decide the weights.
MAY_CHANGE = """attn_implementation dataset_name eval_dataset_name eval_dataset_split eval_steps
gradient_checkpointing logging_steps max_epochs max_steps micro_train_batch_size micro_train_tokens
output_dir push_to_hub report_to resume run_name save_actor_limit save_actor_steps save_dtype save_steps
save_total_limit stop_after values_steps values_tokens"""


def test_what_a_resumed_run_of_any_recipe_may_change():
    assert set(MAY_CHANGE.split()) == arguments.MAY_CHANGE


FORKS = """
import multiprocessing, os, signal
from accelerate import Accelerator
from common import stopping

signals = stopping.Signals()
fork = multiprocessing.get_context("fork")
for number in range(60):  # some are ended while they are being forked, some while they wait
    process = fork.Process(target=fork.Event().wait)
    process.start()
    process.terminate()
    process.join(10)
    assert process.exitcode == -signal.SIGTERM, process.kill()
accelerator = Accelerator(cpu=True)
assert signals.of_any(accelerator) == 0
if accelerator.process_index == 1:
    os.kill(os.getpid(), signal.SIGUSR1)
assert signals.number == signal.SIGUSR1 * accelerator.process_index
assert signals.of_any(accelerator) == signal.SIGUSR1
"""


def test_what_a_reward_function_forks_has_signals_of_its_own(tmp_path):
    """A pool ends its workers by SIGTERM. Python would not handle it while a worker waits for a lock."""
    (tmp_path / "forks.py").write_text(FORKS)
    launch(LAUNCHERS["ddp"], tmp_path / "forks.py", timeout=100)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_counts_nowhere_may_be_anything(bad):
    """Tokens of weight 0, and padding rows; the rows of the others are named."""
    losses = [torch.tensor([[1.0, bad], [2.0, 3.0]]), torch.tensor([[bad, bad]])]
    weights = [torch.tensor([[1.0, 0.0], [1.0, 0.5]]), torch.zeros(1, 2)]
    micro_batches = list(zip([[4, 7], [9]], losses, weights))
    progress = Progress(10, 2, 1, 0)
    stopping.check_finite(progress, micro_batches)
    losses[0][1, 1] = bad
    with pytest.raises(
        FloatingPointError, match=r"because of data rows 7\. .*Not finite: the loss"
    ):
        stopping.check_finite(progress, micro_batches)


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / "actors/.global_step_000001.deleting").mkdir(parents=True)
    for name in (".global_step_000004.writing", "global_step_000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    small_run(tmp_path, resume="never").find()
    assert [path.name for path in tmp_path.glob("*/*")] == ["global_step_000002"]


def test_a_checkpoint_on_another_disk_ends_no_run_when_it_is_rotated(tmp_path):
    """Only the link goes: to delete what is left of it would be an error."""
    for name in ("elsewhere", "checkpoints/global_step_000004"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkpoints/global_step_000002").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        folders.rotate(tmp_path / "checkpoints", keep=1)
        small_run(tmp_path, resume="never").find()
    kept = [path.name for path in folders.by_step(tmp_path / "checkpoints")]
    assert (tmp_path / "elsewhere").is_dir() and kept == ["global_step_000004"]


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_part_of_it(tmp_path, monkeypatch):
    for step in (2, 4):
        (tmp_path / f"global_step_{step:06d}").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: None)
    folders.rotate(tmp_path, keep=1)
    assert [path.name for path in folders.by_step(tmp_path)] == ["global_step_000004"]


def test_a_signal_while_a_checkpoint_is_written_does_not_write_it_twice(tmp_path, monkeypatch):
    written = []
    write = lambda self, temporary, final: written.append(final.name)
    monkeypatch.setattr(Checkpoint, "write", write)
    run = small_run(tmp_path)
    for run.run.global_step in (4, 4, 5):
        run.save()
    assert written == ["global_step_000004", "global_step_000005"]
