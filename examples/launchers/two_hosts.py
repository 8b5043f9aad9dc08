"""Run a launcher's script on two network namespaces of this machine, as on two hosts: CPU, gloo, Linux and root.

    python examples/launchers/two_hosts.py torchrun
    python examples/launchers/two_hosts.py deepspeed
    python examples/launchers/two_hosts.py slurm      # with stand-ins for srun and scontrol, which are not SLURM

What to look at: nothing but a link is between the hosts, so what they train together has gone over it. It shows the
addresses, ports, ranks and variables of a launcher. It does not show what hosts do not share: files, and a clock.
"""

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ADDRESSES = ("10.78.0.1", "10.78.0.2")
RANKS = 2  # per host
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf '%s\\n' {addresses}\n",
    # Each option of srun is one word here. A task has the variables that SLURM gives it, as far as they are used.
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
node=0
for host in {hosts}; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 ip netns exec "$host" "$@" &
    node=$((node + 1))
done
failed=0
for task in $(jobs -p); do wait "$task" || failed=1; done
exit $failed
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=("torchrun", "deepspeed", "slurm"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the training script")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("Network namespaces need root. Run this as root, for example with sudo.")
    environment = {
        **os.environ,
        "HEAD": ADDRESSES[0],
        "RANKS": str(RANKS),
        "GLOO_SOCKET_IFNAME": "eth0",  # the name of this machine is the same in both, and tells no address
        "DS_ACCELERATOR": "cpu",  # else DeepSpeed's launcher looks for GPUs
    }
    with hosts() as names, tempfile.TemporaryDirectory() as folder:
        if options.launcher == "slurm":
            for name, text in STAND_INS.items():
                file = Path(folder, name)
                file.write_text(text.replace("{hosts}", " ".join(names)).replace("{addresses}", " ".join(ADDRESSES)))
                file.chmod(0o755)
            environment["PATH"] = f"{folder}:{environment['PATH']}"
            environment |= {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host-[0-1]"}
            commands = [["bash", str(HERE / "slurm.sbatch"), *options.arguments]]  # srun enters the namespaces
        else:
            hostfile = Path(folder, "hosts.txt")
            hostfile.write_text("".join(f"{address} slots={RANKS}\n" for address in ADDRESSES))
            environment["HOSTFILE"] = str(hostfile)
            script = ["bash", str(HERE / f"{options.launcher}.sh"), *options.arguments]
            commands = [["ip", "netns", "exec", name, *script] for name in names]
        codes = run(commands, environment)
        for name in names:
            print(f"{name} sent {sent(name) / 1e6:.2f} MB over the link")
    if any(codes):
        raise SystemExit(f"The commands ended with {codes}")


def run(commands: list[list[str]], environment: Mapping[str, str]) -> list[int]:
    """Run the commands at the same time, the first as NODE 0, and return how they ended."""
    with ExitStack() as stack:
        running = []
        for node, command in enumerate(commands):
            process = subprocess.Popen(command, env={**environment, "NODE": str(node)})
            stack.callback(process.terminate)  # nothing where it has ended
            running.append(process)
        return [process.wait(timeout=300) for process in running]


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Two namespaces with a link between them."""
    names = [f"zerosync-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def sent(name: str) -> int:
    """Bytes that have left the host, by the counter of its interface."""
    counter = ["ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.check_output(counter, text=True))


if __name__ == "__main__":
    main()
