#!/bin/bash
# Runs a recipe on one or more nodes under Slurm, and starts it again when its time is up:
#   sbatch --nodes 2 --gpus-per-node 8 accelerate_configs/slurm.sh accelerate_configs/ds_zero3.yaml \
#       recipes/dpo.py --output_dir /shared/runs/mine --resume auto ...
# Submit it in the root of the repository. To continue, the run needs --resume auto and an --output_dir that all nodes
# see.
#SBATCH --job-name=recipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
# Each node has one task: `accelerate launch`, which starts a process per GPU. B: means that only this shell gets
# SIGUSR1, five minutes before the end. So it knows why the run ends and requeues the job. Slurm requeues by itself
# after pre-emption and a failed node, but not when the time is up. SIGTERM means pre-emption or scancel, and goes to
# the run as well.
set -u
config=$1
shift

# If the hosts' names resolve to another network, or to 127.0.0.1:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# By default the launcher kills its workers after 30 s, even if their checkpoint is not yet written.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on one node need two ports
per_node=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs: give --gpus-per-node, or set PROCESSES_PER_NODE}}

# In single quotes, so that each node inserts its own SLURM_NODEID. Without --kill-on-bad-exit the other nodes would
# wait for one that failed.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$0" --num_machines "$SLURM_NNODES" --num_processes "$1" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "${@:2}"' \
    "$config" "$((per_node * SLURM_NNODES))" "$@" &
step=$!

time_is_up=
stop() {
    time_is_up=yes
    # The launchers get this signal, this shell does not. Each passes it on, and the run writes a checkpoint.
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1
trap : TERM  # this shell must outlive the run: if it ended, the run would be killed while it writes
wait "$step"
status=$?
while kill -0 "$step" 2> /dev/null; do  # a trap ended the wait, but the run goes on
    wait "$step"
    status=$?
done
if [ -n "$time_is_up" ] && [ "$status" -ne 0 ]; then  # 0: the run was complete before the limit
    echo "slurm.sh: the time is up, job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
