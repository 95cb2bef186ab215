#!/usr/bin/env bash
# Makes or refreshes the project's virtual environment: Python 3.11 where there is one (else 3.12
# or 3.13), this repository installed editable with the extras named, and packages that a CPU build
# of torch cannot load taken out again. Does nothing when nothing changed since the last run.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/setup.sh [--venv DIR] [--extras LIST] [--force]

  --venv DIR     the virtual environment to make or refresh (default: .venv in the repository)
  --extras LIST  extras of pyproject.toml to install, separated by commas
                 (default: cpu,router,bench,test; "" installs the bare package)
  --force        run pip even if nothing changed

Environment: PYTHON names the interpreter to use instead of looking for one.
pip's output goes to DIR/setup.log; DIR/setup.stamp says what was installed.
EOF
}

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup.sh: %s\n' "$*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
extras=cpu,router,bench,test
force=

while (($#)); do
    case $1 in
        --venv) venv=${2:?--venv needs a directory}; shift 2 ;;
        --extras) extras=${2-}; shift; shift || die "--extras needs a list, as in --extras cpu,test" ;;
        --force) force=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown argument '$1': see scripts/setup.sh --help" ;;
    esac
done
[[ $venv = /* ]] || venv=$PWD/$venv

# A name on PATH is not enough: a pyenv shim exists for versions that are not switched on.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null
}
find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$name" >/dev/null && usable "$name"; then
            command -v "$name"
            return
        fi
    done
    die "found no Python 3.11 to 3.13 with the venv module (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3}): install one (Debian: apt-get install python3.11-venv) or name it, as in PYTHON=/path/to/python3.11 scripts/setup.sh"
}

# Runs a command with its output in the log, and says every 20 s that it still runs.
logged() {
    local pid began=$SECONDS
    "$@" >>"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - began >= 20)); then
            began=$SECONDS
            say "  ... $(grep -v '^WARNING' "$log" | tail -n 1 | cut -c 1-100)"
        fi
    done
    if ! wait "$pid"; then
        tail -n 15 "$log" >&2
        die "'$*' failed; its last lines are above, all of it is in $log"
    fi
}

# Packages built against one torch: beside another they may fail on import, and transformers then
# fails too, since it imports whatever it finds installed. module:distribution.
drop_broken() {
    local pair module dist error
    for pair in torchvision:torchvision torchaudio:torchaudio torchcodec:torchcodec torchao:torchao \
        xformers:xformers flash_attn:flash-attn bitsandbytes:bitsandbytes soundfile:soundfile; do
        module=${pair%%:*} dist=${pair#*:}
        "$py" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec(sys.argv[1]))' \
            "$module" || continue
        if ! error=$(timeout -k 5 120 "$py" -c "import $module" 2>&1 </dev/null); then
            error=$(tail -n 1 <<<"$error" | cut -c 1-120)
            say "$dist does not load beside this torch, so it is removed (${error:-no answer within 120 s})"
            logged "$py" -m pip uninstall -y "$dist"
        fi
    done
}

py=$venv/bin/python
if [[ ! -x $py ]]; then
    base=$(find_python)
    say "making $venv with $("$base" -V)"
    "$base" -m venv "$venv" || die "could not make a virtual environment in $venv: remove that folder, or name another with --venv"
elif ! usable "$py"; then
    die "$py is no working Python 3.11 to 3.13: remove $venv and run this again, or name another folder with --venv"
fi
log=$venv/setup.log
stamp=$venv/setup.stamp

wanted=$({
    cat "$root/pyproject.toml" "${BASH_SOURCE[0]}"
    tr , '\n' <<<"$extras" | sort
    printf '%s\n' "$root"
    "$py" -V
} | sha256sum | cut -d ' ' -f 1)
if [[ -z $force && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "$venv is up to date"
    exit 0
fi

rm -f "$stamp"
: >"$log"
say "upgrading pip"
logged "$py" -m pip install --upgrade pip
say "installing neuron-push${extras:+[$extras]} editable (a first install with cpu takes minutes)"
logged "$py" -m pip install --editable "$root${extras:+[$extras]}"
if unknown=$(grep -o "does not provide the extra '[^']*'" "$log"); then
    die "pyproject.toml has no such extra: pip says neuron-push ${unknown%%$'\n'*}; correct --extras"
fi
drop_broken

say "checking"
"$py" -c 'import neuron_push' || die "neuron_push does not import from $venv: its traceback is above; see also $log"
if "$py" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))'; then
    cuda=$("$py" -c 'import torch; print(torch.version.cuda or "")') ||
        die "torch does not import from $venv: its traceback is above; remove $venv and run this again"
    if [[ ,$extras, == *,cpu,* && -n $cuda ]]; then
        say "note: this torch is a build for CUDA $cuda; it works, but a CPU build is smaller: give pip a CPU wheel of torch (PIP_FIND_LINKS=folder) before running this"
    fi
fi
printf '%s\n' "$wanted" >"$stamp"
say "done: $venv"
