#!/usr/bin/env bash
# Checks the GPU backend on a machine with one NVIDIA GPU: registers device memory in two
# processes, pushes block sets through the real worker classes, compares contents, measures.
# From the repository plus wheels; no package index, nothing installed outside of it.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/check_gpu.sh [--wheels DIR] [--dry-run] [--json FILE] [--gpu N] [--backend NAME]

  --wheels DIR    make .work/check-venv from the wheels in DIR, without a package index: torch,
                  nixl, numpy, msgspec, pyzmq, typer, nvidia-ml-py and what they need
  --dry-run       list the steps and run none
  --json FILE     write a report there: every step, also those that were not run, and why
  --gpu N         CUDA's index of the GPU (default 0)
  --backend NAME  NIXL backend: UCX (default) or LIBFABRIC

Environment: PYTHON  an interpreter that has the packages (default: the repository's
                     .venv/bin/python, else python3)
Exit codes: 0 all steps passed; 1 a step failed; 2 there is no NVIDIA GPU here. Under 8 minutes.
EOF
}

die() { printf 'check_gpu.sh: %s\n' "$*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_check_env.sh
python=
source "$root/scripts/_check_env.sh"
wheels=
arguments=()
while (($#)); do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a directory}; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) arguments+=("$1"); shift ;;
    esac
done
packages=(torch nixl numpy msgspec pyzmq typer rich nvidia-ml-py)
check_python "$wheels" "${packages[@]}"
exec timeout -k 10 470 "$python" "$root/scripts/_check_gpu.py" "${arguments[@]}"
