#!/usr/bin/env bash
# Puts the Python sources of vLLM 0.24.0 (what vllm-neuron builds on) into a folder of their own, for
# the contract tests. Its compiled parts and dependencies are left out. A folder that is there
# already is kept.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/get_vllm_024.sh [DIR]

  DIR  the folder to make (default: .work/vllm-0.24.0 in the repository);
       its path is the only line on standard output

Environment: PYTHON  an interpreter with pip (default: the repository's .venv/bin/python)
The wheel is 280 MB to fetch; PIP_FIND_LINKS may name a folder that holds it.
To fetch again, remove DIR.
EOF
}

say() { printf '[vllm %3ds] %s\n' "$SECONDS" "$*" >&2; }
die() { printf 'get_vllm_024.sh: %s\n' "$*" >&2; exit 1; }

case ${1-} in
    -h | --help) usage; exit 0 ;;
    -*) die "unknown argument '$1': see scripts/get_vllm_024.sh --help" ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${1:-$root/.work/vllm-0.24.0}
[[ $dir = /* ]] || dir=$PWD/$dir
python=${PYTHON:-$root/.venv/bin/python}

parent=$(dirname "$dir")
mkdir -p "$parent"
exec 9>"$parent/.$(basename "$dir").lock"
flock -w 900 9 || die "another run has been making $dir for 900 s: wait for it, or end it"
if [[ -f $dir/vllm/__init__.py ]]; then
    printf '%s\n' "$dir"
    exit 0
fi
[[ ! -e $dir ]] || die "$dir exists but holds no vLLM: move it away, or name another folder"
[[ -x $python ]] || die "there is no $python: run scripts/setup.sh first, or name an interpreter in PYTHON"

tmp=$(mktemp -d "$parent/.get_vllm.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
say "fetching the wheel of vllm 0.24.0 (280 MB)"
"$python" -m pip download -q --no-deps --only-binary :all: -d "$tmp" vllm==0.24.0 >"$tmp/log" 2>&1 ||
    { tail -n 5 "$tmp/log" >&2; die "pip could not fetch vllm 0.24.0 (above is why): check that '$python -m pip download' reaches PyPI"; }
say "unpacking its Python sources"
"$python" - "$tmp"/vllm-0.24.0*.whl "$tmp/sources" <<'EOF'
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
EOF
[[ -f $tmp/sources/vllm/__init__.py ]] || die "the wheel of vllm 0.24.0 holds no vllm/__init__.py: its contents changed"
mv -T "$tmp/sources" "$dir"
say "made $dir"
printf '%s\n' "$dir"
