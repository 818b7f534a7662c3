"""One node of a job that continues when the other node is lost: elastic_node.py SCRIPT, then the script's arguments."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

# What the launcher tells each node of a job that is not torchrun's.
node, head, port = (os.environ[name] for name in ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
    way.connect((head, int(port)))  # sends nothing; but now it is known from which address it would
    own = f"127.0.0.{1 + int(node)}" if head.startswith("127.") else way.getsockname()[0]
# Node 0 is where they meet. A node that has not been heard of for 3 × 1 s is lost; a round begins 2 s after the last
# one has joined.
meeting = f"is_host={int(node == '0')},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
options = [
    "--nnodes=1:2",
    "--max-restarts=3",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    f"--rdzv-endpoint={head}:{port}",
    f"--rdzv-conf={meeting}",
    f"--local-addr={own}",
]
program = [str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
print("torchrun", shlex.join(options), program[0], flush=True)
# The agent is torchrun, and listens at this address only.
environment = {**os.environ, "LAB_JOIN_TIMEOUT": os.environ["LAB_LIMIT"]}
ended = subprocess.run([sys.executable, "-m", "nodelaunch.node.agent", *options, *program], env=environment).returncode
if ended and node != "0":
    print(f"this node is lost (exit status {ended}); the other one goes on", flush=True)
    ended = 0
sys.exit(ended)
