#!/bin/bash
# One task for each GPU; each learns its rank from Slurm. Other machines: change the four numbers.
#   sbatch recipes/launchers/slurm.sh sft --config llama-3.1-8b-sft-stage3.yaml --output_dir /shared/run1
#SBATCH --job-name=hf_zero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
# Two minutes before the job's time is over all ranks save and leave. The same command goes on there.
#SBATCH --signal=USR1@120

set -euo pipefail

machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${machines%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs that share a machine have ports of their own
WORLD_SIZE=$SLURM_NTASKS
OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
NCCL_LAUNCH_ORDER_IMPLICIT=${NCCL_LAUNCH_ORDER_IMPLICIT:-1} # shard groups and others have communicators of their own
export MASTER_ADDR MASTER_PORT WORLD_SIZE OMP_NUM_THREADS NCCL_LAUNCH_ORDER_IMPLICIT

srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python -m hf_zero.recipes "$@"' task "$@"
