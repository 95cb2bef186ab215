#!/usr/bin/env bash
# Sets up everything and runs every check: lint, types, import lines, unit, integration, faults and
# end-to-end tests. What CI runs.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/test.sh [quick]    everything; with `quick` what is done in two minutes: lint, types,
                                  unit tests and a push over real NIXL, no vLLM servers
       scripts/test.sh ARGS...    set up, then pytest with these arguments

Environment: VENV is the virtual environment to use (default: .venv in the repository).
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
case ${1-} in
    -h | --help) usage; exit 0 ;;
esac

cd "$root"
scripts/setup.sh --venv "$venv"
# The project's own tools find this environment's programs first; tests start some by name.
export PATH="$venv/bin:$PATH"
say() { printf '\n[test %4ds] %s\n' "$SECONDS" "$*"; }

if (($#)) && [[ $1 != quick ]]; then
    exec python -m pytest "$@"
fi

scripts/libfabric_cpu.sh >/dev/null
scripts/get_vllm_024.sh >/dev/null
say "lint, types, import lines"
ruff check .
ruff format --check .
mypy
lint-imports
if [[ ${1-} == quick ]]; then
    say "unit and one real push, without what is slow"
    python -m pytest -q -m "not slow and not soak and not versions" \
        tests/unit tests/integration/test_push.py
    say "quick: done, without faults, lab and end-to-end tests"
    exit 0
fi
say "unit"
python -m pytest -q tests/unit
say "integration (real NIXL, no model)"
python -m pytest -q tests/integration
say "faults (real processes)"
python -m pytest -q tests/faults
say "end to end (real vLLM)"
scripts/get_model.sh >/dev/null
python -m pytest -q tests/e2e
say "all done"
