#!/usr/bin/env bash
# Checks Neuron Direct RDMA on a Trainium instance: software, preflight, doctor, rails, WRITEs from
# device to device with contents compared and bandwidth per rail, and one prefill and one decode
# engine if a model is given. It fails closed, and its report says what was not run.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/check_trainium.sh [--dry-run] [--json FILE] [--devices LIST] [--model NAME] [--tp N]

  --dry-run       list the steps and run none
  --json FILE     write a report there: every step, also those that were not run, and why
  --devices LIST  Neuron devices to push from, each to the next, as in 0,8 (the default)
  --model NAME    also serve this model with two engines and a router (a first start compiles)
  --tp N          tensor-parallel size of these engines (default 4: one device each)

Environment: PYTHON  an interpreter that has the packages (default: the repository's
                     .venv/bin/python, else python3; on the Neuron image its vLLM environment)
No engine may be running: a core in use by one process cannot be used by another.
Exit codes: 0 all steps passed; 1 a step failed; 2 there is no Neuron device here.
EOF
}

die() { printf 'check_trainium.sh: %s\n' "$*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_check_env.sh
python=
source "$root/scripts/_check_env.sh"
for argument in "$@"; do
    case $argument in -h | --help) usage; exit 0 ;; esac
done
check_python ""
exec "$python" "$root/scripts/_check_trainium.py" "$@"
