#!/bin/bash
# A recipe on one or more nodes under Slurm, started again when its time is up:
#   sbatch --nodes 2 --gpus-per-node 8 accelerate_configs/slurm.sh accelerate_configs/ds_zero3.yaml \
#       recipes/dpo.py --output_dir /shared/runs/mine --resume auto ...
# Submit it in the root of the repository. --resume auto with an --output_dir that all nodes see is what makes going on work.
#SBATCH --job-name=recipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
# One task a node: `accelerate launch`, which starts a process per GPU. B: five minutes before the end this shell alone gets SIGUSR1, so
# that it knows why the run left: Slurm requeues by itself after pre-emption and a failed node, not when the time is up. SIGTERM means
# pre-emption or scancel, and goes to the run as well.
set -u
config=$1
shift

# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0     # where the hosts' names resolve to another network, or to 127.0.0.1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # the launcher kills its workers after 30 s else, whether their checkpoint is written or not
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on one node take two ports
per_node=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs: give --gpus-per-node, or set PROCESSES_PER_NODE}}

# Single quotes: each node puts in its own SLURM_NODEID. Without --kill-on-bad-exit the others would wait for a node that failed.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$0" --num_machines "$SLURM_NNODES" --num_processes "$1" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "${@:2}"' \
    "$config" "$((per_node * SLURM_NNODES))" "$@" &
step=$!

time_is_up=
stop() {
    time_is_up=yes
    scancel --signal=TERM "$SLURM_JOB_ID"  # to the launchers, not to this shell; each passes it on, and the run writes a checkpoint
}
trap stop USR1
trap : TERM  # this shell must outlive the run: its end would kill the run while it writes
wait "$step"
status=$?
while kill -0 "$step" 2> /dev/null; do  # that was a trap, the run goes on
    wait "$step"
    status=$?
done
if [ -n "$time_is_up" ] && [ "$status" -ne 0 ]; then  # 0: it came to its end in these minutes
    echo "slurm.sh: the time is up, job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
