#!/usr/bin/env bash
# Several hosts, with torchrun. The same command on each of them, but for NODE:
#
#   HEAD=192.168.0.1 NODE=0 examples/launchers/torchrun.sh   # on the first host
#   HEAD=192.168.0.1 NODE=1 examples/launchers/torchrun.sh   # on the second
#
# HEAD: the first host's address; PORT: one that is free there; NODES: how many hosts;
# RANKS: of one host, one for each of its GPUs. Arguments go to the training script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec torchrun --nnodes "${NODES:-2}" --node-rank "$NODE" --nproc-per-node "${RANKS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" \
    examples/plain_deepspeed.py --stage 3 "$@"
