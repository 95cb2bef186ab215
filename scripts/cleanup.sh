#!/usr/bin/env bash
# Ends what scripts/serve_pd.sh (server) or scripts/run_sweep.sh (proxy) started on this host, by
# their pid files, and nothing else.
set -euo pipefail

usage() {
    cat <<'EOU'
Usage: scripts/cleanup.sh proxy|server|all

Environment: RUN_DIR as for the script that started it (default: /tmp/neuron-push-serve-UID)
             DRY_RUN=1 prints what would be ended
EOU
}

say() { printf 'cleanup.sh: %s\n' "$*"; }
case ${1-} in
    -h | --help) usage; exit 0 ;;
    proxy | server) kinds=("$1") ;;
    all) kinds=(proxy server) ;;
    *) usage >&2; exit 2 ;;
esac
run_dir=${RUN_DIR:-/tmp/neuron-push-serve-$(id -u)}

started() { awk '{print $22}' "/proc/$1/stat" 2>/dev/null || true; }

end_one() {
    local file=$1 pid start waited
    read -r pid start <"$file" || true
    if [[ ! $pid =~ ^[1-9][0-9]*$ || -z $start || $(started "$pid") != "$start" ]]; then
        say "$(basename "$file"): not running any more"
        [[ ${DRY_RUN:-} == 1 ]] || rm -f "$file"
        return
    fi
    if [[ ${DRY_RUN:-} == 1 ]]; then
        say "would end pid $pid and its process group ($(basename "$file"))"
        return
    fi
    say "ending pid $pid ($(basename "$file"))"
    kill -TERM "$pid" 2>/dev/null || true
    for ((waited = 0; waited < 100; waited++)); do
        [[ $(started "$pid") == "$start" ]] || break
        sleep 0.2
    done
    # Its session's group is of its own making (setsid): workers that outlived it go too.
    kill -KILL -- "-$pid" 2>/dev/null || true
    rm -f "$file"
}

found=
for kind in "${kinds[@]}"; do
    for file in "$run_dir/$kind"*.pid; do
        [[ -f $file ]] || continue
        found=1
        end_one "$file"
    done
done
[[ -n $found ]] || say "nothing of ours in $run_dir"
