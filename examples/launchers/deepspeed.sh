#!/usr/bin/env bash
# Several hosts, with DeepSpeed's launcher. The same command on each of them, but for NODE:
#
#   HEAD=192.168.0.1 NODE=0 HOSTFILE=hosts.txt examples/launchers/deepspeed.sh
#   HEAD=192.168.0.1 NODE=1 HOSTFILE=hosts.txt examples/launchers/deepspeed.sh
#
# hosts.txt has a line for each host, in the order of NODE, with the number of its ranks:
# `node-0 slots=8`. Without --no_ssh and --node_rank, DeepSpeed wants the command on the
# first host only, and starts the others over ssh (pdsh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Without --no_local_rank, the script gets an argument --local_rank=N.
exec deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE" \
    --master_addr "$HEAD" --master_port "${PORT:-29500}" --no_local_rank \
    examples/plain_deepspeed.py --stage 3 "$@"
