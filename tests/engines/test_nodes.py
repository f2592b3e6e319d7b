"""Several nodes, and other launchers than accelerate: the numbers of one node."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from runs import PYTHON, REPOSITORY, config_launcher, letters, recipe, timeless, weights

pytestmark = pytest.mark.slow

UPDATES = 100
NODE_TIMEOUT = 150


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return letters(tmp_path_factory.mktemp("nodes"), 16)


def flags(inputs, output, updates=UPDATES):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--micro_train_batch_size", 2, "--max_steps", updates, "--learning_rate", 1e-3, "--report_to", "none"]  # fmt: skip


@pytest.fixture(scope="module")
def one_node(inputs):
    """Two processes in DDP, fp32, by plain torchrun, which is all a recipe needs for that."""
    output = inputs / "one-node"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *torchrun, str(recipe("sft")), *map(str, flags(inputs, output))]
    result = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=NODE_TIMEOUT,
        env=environment(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "x 2 processes x 2 gradient accumulation steps\n" in result.stdout
    assert "DDP fp32 on cpu" in result.stdout
    return output


def environment(**more):
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def assert_same_run(output, reference):
    assert timeless(output) == timeless(reference)  # two summands: no order of adding to differ
    assert weights(output).equal(weights(reference))


@pytest.fixture(scope="module")
def two_nodes():
    """Two network namespaces with a cable between them: (name, address) of each, and the name of both ends of the cable."""
    nodes, cable = (
        [(f"node{number}-{os.getpid()}", f"10.213.77.{number + 1}") for number in range(2)],
        f"cable{os.getpid()}",
    )
    with contextlib.ExitStack() as undo:
        for name, _ in nodes:
            ip_or_skip("netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name])  # and its end of the cable
        ip_or_skip(
            "link",
            "add",
            cable,
            "netns",
            nodes[0][0],
            "type",
            "veth",
            "peer",
            "name",
            cable,
            "netns",
            nodes[1][0],
        )
        for name, address in nodes:
            ip_or_skip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip_or_skip("-n", name, "link", "set", cable, "up")
            ip_or_skip("-n", name, "link", "set", "lo", "up")
            ip_or_skip("netns", "exec", name, "true")
        yield nodes, cable


def ip_or_skip(*command):
    try:
        subprocess.run(["ip", *command], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip()
        pytest.skip(
            f"two nodes need network namespaces, which cannot be made here: `ip {' '.join(command)}` failed: {why}"
        )


def launch_on(two_nodes, launcher, *command):
    """The same launch on both nodes but for `--machine_rank`; what each printed."""
    nodes, cable = two_nodes
    processes = []
    # Gloo takes the address that the host's name resolves to, here as on many machines 127.0.0.1, where no other node can reach it.
    env = environment(GLOO_SOCKET_IFNAME=cable)
    try:
        for rank, (name, _) in enumerate(nodes):
            several = [
                "--num_machines",
                2,
                "--machine_rank",
                rank,
                "--main_process_ip",
                nodes[0][1],
                "--main_process_port",
                29500,
            ]
            whole = ["ip", "netns", "exec", name, sys.executable, *launcher, *several, *command]
            processes.append(subprocess.Popen(list(map(str, whole)), cwd=REPOSITORY, env=env, stdout=subprocess.PIPE,
                                              stderr=subprocess.STDOUT, text=True))  # fmt: skip
        outputs = [process.communicate(timeout=NODE_TIMEOUT)[0] for process in processes]
    finally:
        for name, _ in nodes:  # what still runs there is ours
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for process, output in zip(processes, outputs):
        assert process.returncode == 0 or "\ndone: " in output, output[-4000:]
    return outputs


def test_two_nodes_are_one_node_with_two_processes(inputs, one_node, two_nodes):
    output = inputs / "multi_node"
    # Both say "x 2 processes", and each node has one of them: the first of a node prints.
    outputs = launch_on(
        two_nodes,
        [*config_launcher("multi_node", 2), "--mixed_precision", "no"],
        recipe("sft"),
        *flags(inputs, output),
    )
    for text in outputs:
        assert "x 2 processes x 2 gradient accumulation steps\n" in text
        assert "DDP fp32 on cpu" in text
    assert_same_run(output, one_node)


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
    "scontrol": """if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<< "$3"; else echo "$@" >> "$NOTES/scontrol"; fi""",
    "accelerate": f'shift; exec {sys.executable} {" ".join(PYTHON)} "$@"',
}


def test_the_slurm_script_runs_two_nodes_and_goes_back_into_the_queue(inputs, one_node, tmp_path):
    """Stopped by the signal before the time limit, requeued, run again to the end: the run that was never stopped."""
    script, output = REPOSITORY / "accelerate_configs/slurm.sh", inputs / "slurm"
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = dict(
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="127.0.0.1,127.0.0.2",
        PROCESSES_PER_NODE="1",
    )
    command = [
        "bash",
        script,
        "accelerate_configs/cpu.yaml",
        recipe("sft"),
        *flags(inputs, output),
        "--resume",
        "auto",
    ]
    for turn in ("stopped", "ended"):
        notes = tmp_path / turn
        notes.mkdir()
        env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", NOTES=str(notes), **job)
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=REPOSITORY,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            deadline = time.time() + NODE_TIMEOUT
            while (
                turn == "stopped"
                and not (output / "metrics.jsonl").is_file()
                and process.poll() is None
            ):
                assert time.time() < deadline
                time.sleep(0.02)
            if turn == "stopped":
                process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does
            printed, _ = process.communicate(timeout=NODE_TIMEOUT)
        finally:
            for pid in (notes / "pids").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
        said = [(notes / f"node{node}").read_text() for node in range(2)]
        for text in said:
            assert "x 2 processes x 2 gradient accumulation steps\n" in text, text
            assert "DDP fp32 on cpu" in text, text
        if turn == "stopped":
            assert (
                process.returncode
                and "goes back into the queue" in printed
                and "done: " not in said[0]
            )
            assert (notes / "scancel").read_text().split() == ["--signal=TERM", job["SLURM_JOB_ID"]]
            assert (notes / "scontrol").read_text().split() == ["requeue", job["SLURM_JOB_ID"]]
            assert len(list((output / "checkpoints").glob("global_step_*"))) == 1
        else:
            assert process.returncode == 0, printed + said[0] + said[1]
            assert f"done: {UPDATES} updates" in said[0] and not (notes / "scontrol").exists()
    assert_same_run(output, one_node)
