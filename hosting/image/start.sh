#!/usr/bin/env bash
# Starts a team's container: "lab" is JupyterLab on node0, "hub" the same under JupyterHub, and "node" is
# node1, which waits for ssh. Anything else is run as it stands.
set -euo pipefail
shopt -s nullglob

# A guard beside the teams' containers keeps them from the cloud's metadata service (hosting/guard.py). All start with
# the machine, in any order: nothing of the team runs before the guard does, which refuses at once. Silence can be a
# network that is not up yet; it can be a machine that sends no refusals, too, so 30 s of it are enough.
if [ -n "${LAB_GUARDED:-}" ]; then
  silent=0
  while [ "$silent" -lt 30 ]; do
    status=0
    said=$(LC_ALL=C timeout 2 bash -c '< /dev/tcp/169.254.169.254/80' 2>&1) || status=$?
    case "$status $said" in
      *"No route to host"* | *"Permission denied"*) break ;;
      0* | *"Connection refused"*)
        echo "waiting for the guard: the metadata service can be reached" >&2
        silent=0
        ;;
      124*) silent=$((silent + 3)) ;;
      *) silent=$((silent + 1)) ;;
    esac
    sleep 1
  done
fi

# Keys are made here, at each container's first start, and never in the image: whoever has the image has no key.
# What others may know, the public halves, the two nodes of a team lay into a volume that they alone share.
keys=/srv/keys ssh=$HOME/.ssh
make_keys() {
  mkdir -p -m 700 "$ssh"
  for kind in host user; do
    [ -e "$ssh/$kind" ] || ssh-keygen -q -t ed25519 -N "" -C "$(hostname)" -f "$ssh/$kind"
    cp "$ssh/$kind.pub" "$keys/.$(hostname).$kind" && mv "$keys/.$(hostname).$kind" "$keys/$(hostname).$kind"
  done
  # Both ask at each connection, so that a node that was made anew is known by its new key.
  cat > "$ssh/known" <<'EOF'
#!/bin/sh
for node in node0 node1; do [ -r "/srv/keys/$node.host" ] && echo "[$node]:2222 $(cut -d' ' -f1,2 "/srv/keys/$node.host")"; done
exit 0
EOF
  chmod 700 "$ssh/known"
  cat > "$ssh/config" <<EOF
Host node0 node1
  Port 2222
  IdentityFile $ssh/user
  IdentitiesOnly yes
  KnownHostsCommand $ssh/known
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
EOF
  # A job comes by ssh, and starts as many threads as nproc then says: its part of the CPUs that both nodes share.
  cat > "$ssh/sshd_config" <<EOF
Port 2222
HostKey $ssh/host
AuthorizedKeysFile $keys/node0.user $keys/node1.user
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
Subsystem sftp internal-sftp
${LAB_NODE_THREADS:+SetEnv OMP_NUM_THREADS=$LAB_NODE_THREADS}
EOF
}

if [ -n "${LAB_NODES:-}" ] || [ "${1:-}" = node ]; then make_keys; fi
# Seeds the team's volume with the labs; a file that the team has changed stays as it is.
seed() {
  mkdir -p "$HOME/work"
  python -m course.workspace --workspace "$HOME/work/labs"
}

case "${1:-lab}" in
  lab)
    seed
    if [ -n "${LAB_NODES:-}" ]; then /usr/sbin/sshd -D -e -f "$ssh/sshd_config" & fi
    exec jupyter lab --no-browser
    ;;
  hub)
    seed
    exec jupyterhub-singleuser "${@:2}"
    ;;
  node) exec /usr/sbin/sshd -D -e -f "$ssh/sshd_config" ;;
  *) exec "$@" ;;
esac
