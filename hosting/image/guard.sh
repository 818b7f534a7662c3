#!/usr/bin/env bash
# Does not let the teams' networks, which are the arguments, reach the metadata service of clouds (hosting/guard.py).
# It runs in the machine's own network. "try" says whether it could.
set -uo pipefail

# Of AWS, Google, Azure, Oracle and OpenStack; of Alibaba; of Azure's agent; and of AWS by IPv6.
places=(169.254.0.0/16 100.100.100.200/32 168.63.129.16/32)
places6=(fd00:ec2::254/128)

# Adds or deletes all rules; fails where one cannot be.
rules() {
  local place protocol network fault=0
  # Names are asked for at the same addresses on some clouds, and stay allowed, by UDP (17) and TCP (6).
  for place in "${places[@]}"; do
    for protocol in 17 6; do
      ip rule "$1" pref 5101 to "$place" ipproto $protocol dport 53 lookup main || fault=1
    done
  done
  for network in "${networks[@]}"; do
    case "$network" in
      *:*) for place in "${places6[@]}"; do ip -6 rule "$1" pref 5102 from "$network" to "$place" prohibit || fault=1; done ;;
      *) for place in "${places[@]}"; do ip rule "$1" pref 5102 from "$network" to "$place" prohibit || fault=1; done ;;
    esac
  done
  return $fault
}

if [ "$1" = try ]; then
  # A network for examples (RFC 5737), so that nothing real is concerned.
  trial=(pref 5102 from 192.0.2.0/24 to 169.254.0.0/16 prohibit)
  ip rule add "${trial[@]}" && ip rule del "${trial[@]}"
  exit
fi

networks=("$@")
trap 'rules del 2> /dev/null; exit 0' TERM INT
rules del 2> /dev/null
rules add || exit 1
echo guarded
# A rule that is there is not added twice. One that somebody else took away comes back.
while true; do
  sleep 5 &
  wait $!
  rules add 2> /dev/null
done
