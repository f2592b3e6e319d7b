"""Several nodes, under Slurm, and torchrun instead of accelerate: the numbers of one node."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from runs import OFFLINE, PYTHON, REPOSITORY, letters, recipe, short_run, timeless, weights

pytestmark = pytest.mark.slow

UPDATES = 100
TIMEOUT = 150
OF_BOTH = "x 2 processes x 2 gradient accumulation steps\n"
# srun starts every node's task here; scancel signals them; scontrol lists the nodes, or notes what it is asked.
SLURM = {
    "srun": """shift
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" > "$NOTES/node$node" 2>&1 & echo $! >> "$NOTES/pids"
done
status=0
for pid in $(cat "$NOTES/pids"); do wait $pid || status=$?; done
exit $status""",
    "scancel": """echo "$@" >> "$NOTES/scancel"; kill -TERM $(cat "$NOTES/pids")""",
    "scontrol": """if [ "$1 $2" = "show hostnames" ]
then tr , '\\n' <<< "$3"
else echo "$@" >> "$NOTES/scontrol"
fi""",
    "accelerate": f'shift; exec {sys.executable} {" ".join(PYTHON)} "$@"',
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return letters(tmp_path_factory.mktemp("nodes"), 16)


def command_of(inputs, output) -> list[str]:
    updates = dict(micro_train_batch_size=2, max_steps=UPDATES, learning_rate=1e-3)
    return [str(recipe("sft")), *short_run(inputs, "sft", output, **updates)]


@pytest.fixture(scope="module")
def one_node(inputs):
    """Two processes in DDP, fp32, by plain torchrun, which is all a recipe needs for that."""
    output = inputs / "one-node"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *torchrun, *command_of(inputs, output)]
    env = os.environ | OFFLINE
    said = subprocess.check_output(command, cwd=REPOSITORY, text=True, timeout=TIMEOUT, env=env)
    assert OF_BOTH in said and "DDP fp32 on cpu" in said
    return output


def test_the_slurm_script_runs_two_nodes_and_goes_back_into_the_queue(inputs, one_node, tmp_path):
    """Stopped by the signal before the time limit, requeued, and run again to the end."""
    output = inputs / "slurm"
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "PROCESSES_PER_NODE": "1"}
    job |= {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2"}
    script = REPOSITORY / "accelerate_configs/slurm.sh"
    config = ["accelerate_configs/multi_node.yaml", "--mixed_precision", "no"]
    command = ["bash", script, *config, *command_of(inputs, output), "--resume", "auto"]
    for turn in ("stopped", "ended"):
        notes = tmp_path / turn
        notes.mkdir()
        env = os.environ | OFFLINE | job
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes)}
        how = dict(cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, **how)
        try:
            if turn == "stopped":
                deadline = time.time() + TIMEOUT
                while not (output / "metrics.jsonl").is_file() and process.poll() is None:
                    assert time.time() < deadline
                    time.sleep(0.02)
                process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does
            printed, _ = process.communicate(timeout=TIMEOUT)
        finally:
            for pid in (notes / "pids").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
        said = [(notes / f"node{node}").read_text() for node in range(2)]
        assert OF_BOTH in said[0], said
        if turn == "stopped":
            assert process.returncode and "goes back into the queue" in printed
            assert "done: " not in said[0]
            assert (notes / "scancel").read_text().split() == ["--signal=TERM", job["SLURM_JOB_ID"]]
            assert (notes / "scontrol").read_text().split() == ["requeue", job["SLURM_JOB_ID"]]
            assert len(list((output / "checkpoints").glob("global_step_*"))) == 1
        else:
            assert process.returncode == 0, printed + said[0] + said[1]
            assert f"done: {UPDATES} updates" in said[0] and not (notes / "scontrol").exists()
    assert timeless(output) == timeless(one_node)  # two summands: no order of adding to differ
    assert weights(output).equal(weights(one_node))
