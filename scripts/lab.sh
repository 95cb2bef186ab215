#!/usr/bin/env bash
# A network of several hosts on one machine: one network namespace per host, joined by a switch (a
# bridge in a namespace of its own, so that this machine's firewall does not see their traffic).
# Each host has eth0 and lo; this machine reaches them too, by .254 of the same network.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/lab.sh up                  make the network; run again, it adds what is missing
       scripts/lab.sh down                remove what `up` made, and nothing else
       scripts/lab.sh rate MBIT|off       limit each direction of every host's link, in Mbit/s
       scripts/lab.sh exec HOST CMD...    run CMD on HOST, in the current folder and environment
       scripts/lab.sh ip HOST             print HOST's address (HOST `root`: this machine's)
       scripts/lab.sh status              show the hosts; exit 3 if the network is not up

Environment: LAB        id of the network (default np; 1 to 8 of a-z 0-9): several can be up at once
             LAB_HOSTS  names of the hosts `up` makes (default "p d"; each 1 to 6 of a-z 0-9)
Needs root. The network is 10.77.X.0/24: X follows from LAB, or is the next one free.
What was made is noted in /run/neuron-push-lab/LAB.
EOF
}

die() { printf 'lab.sh: %s\n' "$*" >&2; exit 1; }

lab=${LAB:-np}
state_dir=/run/neuron-push-lab
state=$state_dir/$lab    # "net X", then "host NAME ADDRESS" a line each
switch=$lab-sw           # the switch's namespace
uplink=$lab-up           # this machine's interface into the network

netns() { [[ -e /run/netns/$1 ]]; }
is_up() { [[ -f $state ]]; }
need_up() { is_up || die "network '$lab' is not up: run 'LAB=$lab scripts/lab.sh up' first"; }
hosts() { sed -n 's/^host \([^ ]*\) .*/\1/p' "$state"; }
address() {
    need_up
    local found
    if [[ $1 == root ]]; then
        found=10.77.$(sed -n 's/^net //p' "$state").254
    else
        found=$(sed -n "s/^host $1 //p" "$state")
    fi
    [[ -n $found ]] || die "network '$lab' has no host '$1': it has $(hosts | xargs)"
    printf '%s\n' "$found"
}

# del_link NAME [NAMESPACE]: no error where there is none, or where it goes at this very moment.
del_link() {
    local at=()
    (($# == 1)) || at=(-n "$2")
    ip "${at[@]}" link del dev "$1" 2>/dev/null || ! ip "${at[@]}" link show dev "$1" >/dev/null 2>&1
}

pick_net() {
    local first x i
    first=$((0x$(printf %s "$lab" | sha256sum | cut -c 1-6) % 250))
    for ((i = 0; i < 250; i++)); do
        x=$(((first + i) % 250 + 1))
        if ! ip -4 -o addr show | grep -qF " 10.77.$x." && ! grep -qsx "net $x" "$state_dir"/*; then
            printf '%s\n' "$x"
            return
        fi
    done
    die "all of 10.77.1.0/24 to 10.77.250.0/24 are taken on this machine: take networks down that are not needed ('ls $state_dir' names them)"
}

up() {
    local x host addr number taken
    mkdir -p "$state_dir"
    exec 9>"$state_dir/.lock"
    flock -w 30 9 || die "another lab.sh has held $state_dir/.lock for 30 s: wait for it, or end it"
    if ! is_up; then
        for taken in "$switch" $wanted_hosts; do
            [[ $taken == "$switch" ]] || taken=$lab-$taken
            ! netns "$taken" || die "a namespace '$taken' exists that lab.sh did not make: choose another id, as in LAB=other scripts/lab.sh up, or remove it with 'ip netns del $taken'"
        done
        ! ip link show dev "$uplink" >/dev/null 2>&1 || die "an interface '$uplink' exists that lab.sh did not make: choose another id, as in LAB=other scripts/lab.sh up"
        x=$(pick_net)
        printf 'net %s\n' "$x" >"$state"
    fi
    x=$(sed -n 's/^net //p' "$state")

    # Where one end's namespace is gone the kernel takes the other end away a little later: now.
    if ! netns "$switch"; then
        del_link "$uplink"
        for host in $(hosts); do
            ! netns "$lab-$host" || del_link eth0 "$lab-$host"
        done
        ip netns add "$switch"
    fi
    ip -n "$switch" link show dev br0 >/dev/null 2>&1 || ip -n "$switch" link add br0 type bridge
    ip -n "$switch" link set dev br0 up
    if ! ip link show dev "$uplink" >/dev/null 2>&1; then
        ip link add "$uplink" type veth peer name root netns "$switch"
    fi
    ip -n "$switch" link set dev root master br0 up
    ip addr replace "10.77.$x.254/24" dev "$uplink"
    ip link set dev "$uplink" up

    for host in $wanted_hosts; do
        addr=$(sed -n "s/^host $host //p" "$state")
        if [[ -z $addr ]]; then
            ! netns "$lab-$host" || die "a namespace '$lab-$host' exists that lab.sh did not make: remove it with 'ip netns del $lab-$host', or leave $host out of LAB_HOSTS"
            number=$(($(hosts | wc -l) + 1))
            ((number < 254)) || die "a network takes 253 hosts at most"
            addr=10.77.$x.$number
            printf 'host %s %s\n' "$host" "$addr" >>"$state"
        fi
        if ! netns "$lab-$host"; then
            del_link "$host" "$switch"
            ip netns add "$lab-$host"
        fi
        if ! ip -n "$lab-$host" link show dev eth0 >/dev/null 2>&1; then
            ip -n "$lab-$host" link add eth0 type veth peer name "$host" netns "$switch"
        fi
        ip -n "$switch" link set dev "$host" master br0 up
        ip -n "$lab-$host" link set dev lo up
        ip -n "$lab-$host" addr replace "$addr/24" dev eth0
        ip -n "$lab-$host" link set dev eth0 up
    done
}

down() {
    is_up || return 0
    local name busy
    for name in $(hosts); do
        if netns "$lab-$name"; then
            busy=$(ip netns pids "$lab-$name" | xargs)
            [[ -z $busy ]] || printf 'lab.sh: processes still run on %s, now without a network: %s\n' "$name" "$busy" >&2
        fi
    done
    # The links go first: a namespace lives on, with its links, while a process is in it.
    del_link "$uplink"
    for name in $(hosts); do
        ! netns "$switch" || del_link "$name" "$switch"
        ! netns "$lab-$name" || ip netns del "$lab-$name"
    done
    ! netns "$switch" || ip netns del "$switch"
    rm -f "$state"
}

# One bucket per direction: on the host's eth0 for what it sends, on its port for what it is sent.
# The burst holds 4 ms of traffic, and never less than two of the largest packets the kernel hands
# down; what waits longer than 50 ms is dropped, as in a switch with that much buffer.
rate() {
    need_up
    local host burst shape
    if [[ $1 == off ]]; then
        shape=()
    elif [[ $1 =~ ^[1-9][0-9]{0,5}$ ]]; then
        burst=$(($1 * 500))
        ((burst >= 131072)) || burst=131072
        shape=(tbf rate "$1mbit" burst "$burst" latency 50ms)
    else
        die "'$1' is no rate: give whole Mbit/s from 1 to 999999, as in 'scripts/lab.sh rate 1000', or 'off'"
    fi
    for host in $(hosts); do
        set -- "$lab-$host" eth0 "$switch" "$host"
        while (($#)); do
            if ((${#shape[@]})); then
                tc -n "$1" qdisc replace dev "$2" root "${shape[@]}"
            elif tc -n "$1" qdisc show dev "$2" | grep -q '^qdisc tbf'; then
                tc -n "$1" qdisc del dev "$2" root
            fi
            shift 2
        done
    done
}

status() {
    if ! is_up; then
        printf "network '%s' is not up\n" "$lab"
        exit 3
    fi
    local host limit
    printf "network '%s': this machine is %s on %s\n" "$lab" "$(address root)" "$uplink"
    for host in $(hosts); do
        if ! netns "$lab-$host" || ! ip -n "$lab-$host" link show dev eth0 >/dev/null 2>&1; then
            printf "  %-6s %-15s broken: run 'LAB=%s scripts/lab.sh up'\n" "$host" "$(address "$host")" "$lab"
            continue
        fi
        limit=$(tc -n "$lab-$host" qdisc show dev eth0 | sed -n 's/^qdisc tbf .* rate \([^ ]*\) .*/\1/p')
        printf '  %-6s %-15s namespace %s, rate %s, %d processes\n' "$host" "$(address "$host")" \
            "$lab-$host" "${limit:-unlimited}" "$(ip netns pids "$lab-$host" | wc -l)"
    done
}

verb=${1-}
case $verb in
    -h | --help | help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
shift
[[ $lab =~ ^[a-z0-9]{1,8}$ ]] || die "LAB='$lab' is no id for a network: use 1 to 8 characters of a-z and 0-9"
wanted_hosts=${LAB_HOSTS:-p d}
for host in $wanted_hosts; do
    [[ $host =~ ^[a-z0-9]{1,6}$ && ! $host =~ ^(sw|up|root|br0|lo)$ ]] ||
        die "LAB_HOSTS has '$host', which is no name for a host: use 1 to 6 characters of a-z and 0-9, and none of sw, up, root, br0, lo"
done
for tool in ip tc flock; do
    command -v "$tool" >/dev/null || die "the command '$tool' is missing: apt-get install iproute2 util-linux"
done
((EUID == 0)) || die "network namespaces need root: run it with sudo, or as root"

case $verb in
    up) up ;;
    down) down ;;
    status) status ;;
    rate) rate "${1:?lab.sh: rate needs a number of Mbit/s, or off}" ;;
    ip) address "${1:?lab.sh: ip needs a host}" ;;
    exec)
        (($# >= 2)) || die "exec needs a host and a command, as in 'scripts/lab.sh exec p ip addr'"
        address "$1" >/dev/null
        host=$1
        shift
        exec ip netns exec "$lab-$host" "$@"
        ;;
    *) die "unknown command '$verb': see scripts/lab.sh --help" ;;
esac
