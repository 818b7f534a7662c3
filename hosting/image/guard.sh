#!/usr/bin/env bash
# Does not let the teams' networks, which are the arguments, reach the metadata service of clouds (hosting/guard.py).
# It runs in the machine's own network. "try" says whether it could.
set -uo pipefail

# Of AWS, Google, Azure, Oracle and OpenStack; of Alibaba; of Azure's agent; of Oracle's older machines. By IPv6 those of
# AWS, Google and Oracle.
places=(169.254.0.0/16 100.100.100.200/32 168.63.129.16/32 192.0.0.192/32)
places6=(fd00:ec2::254/128 fd20:ce::254/128 fd00:c1::a9fe:a9fe/128)

# Adds or deletes one rule. One that is to be added and is there already is as it should be.
rule() {
  local family=$1 said
  said=$(ip "$family" rule "${@:2}" 2>&1) && return
  [[ $2 = add && $said = *"File exists"* ]] && return
  echo "$said" >&2
  return 1
}

# Adds or deletes all rules of the networks that follow; fails where one cannot be.
rules() {
  local place protocol network fault=0
  # Names are asked for at the same addresses on some clouds, and stay allowed, by UDP (17) and TCP (6).
  for place in "${places[@]}"; do
    for protocol in 17 6; do
      rule -4 "$1" pref 5101 to "$place" ipproto $protocol dport 53 lookup main || fault=1
    done
  done
  for network in "${@:2}"; do
    case "$network" in
      *:*) for place in "${places6[@]}"; do rule -6 "$1" pref 5102 from "$network" to "$place" prohibit || fault=1; done ;;
      *) for place in "${places[@]}"; do rule -4 "$1" pref 5102 from "$network" to "$place" prohibit || fault=1; done ;;
    esac
  done
  return $fault
}

if [ "$1" = try ]; then
  # A network for examples (RFC 5737), so that nothing real is concerned.
  trial=(pref 5102 from 192.0.2.0/24 to 169.254.0.0/16 prohibit)
  rule -4 add "${trial[@]}" || exit 3
  ip rule del "${trial[@]}"
  exit 0
fi

# What stands behind "gone" are networks of the guard before this one, which was killed so that no rule went with it.
networks=()
while [ $# -gt 0 ] && [ "$1" != gone ]; do
  networks+=("$1")
  shift
done
trap 'rules del "${networks[@]}" 2> /dev/null; exit 0' TERM INT
if [ $# -gt 1 ]; then rules del "${@:2}" 2> /dev/null; fi
rules add "${networks[@]}" || exit 1
echo guarded
# One that somebody else took away comes back.
while true; do
  sleep 5 &
  wait $!
  rules add "${networks[@]}" 2> /dev/null
done
