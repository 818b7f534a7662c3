#!/usr/bin/env bash
# Does not let containers of this machine reach the metadata service of clouds (hosting/guard.py). It runs in the
# machine's own network. "try" says whether it could.
set -uo pipefail

# Of AWS, Google, Azure, Oracle and OpenStack; of Alibaba; of Azure's agent; of Oracle's older machines.
places4=(169.254.0.0/16 100.100.100.200/32 168.63.129.16/32 192.0.0.192/32)
# Of AWS, Google and Oracle.
places6=(fd00:ec2::254/128 fd20:ce::254/128 fd00:c1::a9fe:a9fe/128)

# Adds or deletes one rule. One that is to be added and is there already is as it should be.
rule() {
  local said
  said=$(ip "$1" rule "${@:2}" 2>&1) && return
  [[ $2 = add && $said = *"File exists"* ]] && return
  echo "$said" >&2
  return 1
}

# Adds or deletes all rules; fails where one cannot be.
rules() {
  local family place protocol fault=0
  for family in 4 6; do
    # Without IPv6, nothing is forwarded by it.
    [ "$family" = 4 ] || [ -e /proc/net/if_inet6 ] || continue
    local -n places="places$family"
    for place in "${places[@]}"; do
      # What the machine itself asks, lo says, stays allowed. So do names, which some clouds answer at the same
      # addresses, by UDP (17) and TCP (6).
      rule "-$family" "$1" pref 5101 iif lo to "$place" lookup main || fault=1
      for protocol in 17 6; do
        rule "-$family" "$1" pref 5101 to "$place" ipproto $protocol dport 53 lookup main || fault=1
      done
      rule "-$family" "$1" pref 5102 to "$place" prohibit || fault=1
    done
  done
  return $fault
}

if [ "${1:-}" = try ]; then
  # A network for examples (RFC 5737), so that nothing real is concerned.
  trial=(pref 5102 from 192.0.2.0/24 to 169.254.0.0/16 prohibit)
  rule -4 add "${trial[@]}" && ip rule del "${trial[@]}"
  exit
fi

trap 'rules del 2> /dev/null; exit 0' TERM INT
rules add || exit 1
echo guarded
# One that somebody else took away comes back.
while true; do
  sleep 5 &
  wait $!
  rules add 2> /dev/null
done
