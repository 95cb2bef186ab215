#!/usr/bin/env bash
# From a fresh clone to a proof: sets up, takes a real small model, serves it with a prefill and a
# decode engine, asks questions, and compares KV and answers with what they should be.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/demo.sh [--json FILE] [--backend UCX|LIBFABRIC] [--max-tokens N]

Makes the virtual environment and the model if they are not there yet (a few minutes, once), starts
a prefill engine, a decode engine, a router and a plain engine, streams the answers to some
questions, and ends with a table. As root the two engines are two hosts (network namespaces);
otherwise both are on loopback.

Ends 0 only if every KV segment arrived as it was sent and every answer is that of the plain engine.
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
backend=UCX
previous=
for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit 0 ;;
        --backend=*) backend=${argument#*=} ;;
        UCX | LIBFABRIC) [[ $previous != --backend ]] || backend=$argument ;;
    esac
    previous=$argument
done

"$root/scripts/setup.sh" --venv "$venv"
model=$(PATH=$venv/bin:$PATH "$root/scripts/get_model.sh")
if [[ $backend == LIBFABRIC ]]; then
    eval "$("$root/scripts/libfabric_cpu.sh" env)"
fi
exec "$venv/bin/python" "$root/scripts/_demo.py" --model "$model" "$@"
