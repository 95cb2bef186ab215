#!/usr/bin/env bash
# Mixed load with random faults over real processes, the long fuzz and the long model test.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/soak.sh MINUTES [SEED]     random faults for so long; the same SEED draws the same ones
       scripts/soak.sh MINUTES all        then the tests marked soak, too (an hour or more)

Environment: PYTHON is the interpreter (default: .venv/bin/python, else python3).
USAGE
}

case ${1-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
esac
[[ $1 =~ ^[0-9]+(\.[0-9]+)?$ ]] || { printf "soak.sh: '%s' is no number of minutes\n" "$1" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
seed=()
[[ -z ${2-} || $2 == all ]] || seed=("$2")
"$python" -m tests.faults.soak "$1" "${seed[@]}"
if [[ ${2-} == all ]]; then
    "$python" -m pytest -q -m soak --timeout 14400 tests/unit tests/faults
fi
