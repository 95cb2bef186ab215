#!/usr/bin/env bash
# Makes the LIBFABRIC plugin of the NIXL wheels loadable on a machine without accelerator or EFA.
# The wheels do not bring libfabric, hwloc or CUDA's libraries: this gathers them in one folder from
# PyPI and Debian, beside a stand-in for the NVIDIA driver's library. Nothing is installed.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/libfabric_cpu.sh [build]    make the folder, if it is not there yet; print its path
       scripts/libfabric_cpu.sh env        the same, but print the exports a process needs:
                                           eval "$(scripts/libfabric_cpu.sh env)"
       scripts/libfabric_cpu.sh check      a WRITE over LIBFABRIC between two network namespaces
                                           (needs root; makes and removes a network of its own)

Environment: LIBFABRIC_DIR  the folder (default: .work/libfabric in the repository)
             PYTHON         an interpreter with pip, and for `check` with nixl (default: the
                            repository's .venv/bin/python)
The exports are LD_LIBRARY_PATH, FI_PROVIDER_PATH and FI_PROVIDER=tcp; set them before the process
starts. libfabric's tcp provider does not work over lo: set FI_TCP_IFACE to another interface where
the machine has several (in a namespace of scripts/lab.sh: eth0).
EOF
}

say() { printf '[libfabric %3ds] %s\n' "$SECONDS" "$*" >&2; }
die() { printf 'libfabric_cpu.sh: %s\n' "$*" >&2; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
dir=${LIBFABRIC_DIR:-$root/.work/libfabric}
[[ $dir = /* ]] || dir=$PWD/$dir
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3
fi
# What is in the folder follows from these and from the stub: a change of either makes it anew.
wheels=(impi-rt==2021.18.1 nvidia-cuda-runtime-cu12==12.9.79 'nvidia-cuda-runtime>=13,<14')
needed=(libfabric.so.1 libtcp-fi.so libhwloc.so.15 libcudart.so.12 libcudart.so.13)

has_library() { ldconfig -p 2>/dev/null | grep -qF "	$1 "; }

# from_debian PACKAGE LIBRARY: takes LIBRARY out of PACKAGE, without installing it.
from_debian() {
    local found
    say "taking $2 from Debian's $1"
    mkdir "$tmp/$1"
    chmod 755 "$tmp/$1"
    (
        cd "$tmp/$1"
        { apt-get download "$1" || { apt-get update && apt-get download "$1"; }; } >"$tmp/log" 2>&1
        dpkg -x "$1"_*.deb .
    ) || { tail -n 5 "$tmp/log" >&2; die "Debian's package $1 could not be fetched (above is why): it takes a Debian or Ubuntu machine whose apt-get works; elsewhere install hwloc so that the loader finds $2"; }
    found=$(find "$tmp/$1" -name "$2" | head -n 1)
    [[ -n $found ]] || die "Debian's package $1 holds no $2: this release of the distribution brings another version; a $2 that the loader finds also does"
    cp -L "$found" "$tmp/new/$2"
}

build() {
    local wheel library missing
    tmp=$(mktemp -d "$(dirname "$dir")/.libfabric.XXXXXX")
    trap 'rm -rf "$tmp"' EXIT
    mkdir "$tmp/new"

    for wheel in "${wheels[@]}"; do
        say "fetching $wheel from PyPI"
        "$python" -m pip download -q --no-deps --only-binary :all: -d "$tmp/wheels" "$wheel" >"$tmp/log" 2>&1 ||
            { tail -n 5 "$tmp/log" >&2; die "pip could not fetch $wheel (above is why): check that '$python -m pip download' reaches PyPI, or name another interpreter in PYTHON"; }
    done
    "$python" - "$tmp/wheels" "$tmp/new" "${needed[@]}" <<'PY'
import pathlib, sys, zipfile

source, target, *wanted = sys.argv[1:]
for wheel in pathlib.Path(source).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = name.rpartition("/")[2]
            if base in wanted:
                pathlib.Path(target, base).write_bytes(archive.read(name))
PY
    has_library libhwloc.so.15 || from_debian libhwloc15 libhwloc.so.15
    has_library libudev.so.1 || from_debian libudev1 libudev.so.1

    if has_library libcuda.so.1; then
        say "this machine has a libcuda.so.1: no stand-in for it"
    else
        say "compiling the stand-in for libcuda.so.1"
        cc -shared -fPIC -O1 -Wall -Wl,-soname,libcuda.so.1 -o "$tmp/new/libcuda.so.1" \
            "$here/stub_libcuda.c" || die "cc could not compile $here/stub_libcuda.c: install a C compiler (apt-get install gcc libc6-dev)"
    fi

    for library in "${needed[@]}"; do
        [[ -f $tmp/new/$library ]] || has_library "$library" ||
            die "$library is in none of the packages fetched (${wheels[*]}): their contents changed; correct the list in ${BASH_SOURCE[0]}"
    done
    missing=$(LD_LIBRARY_PATH=$tmp/new ldd "$tmp"/new/*.so* | sed -n 's/^\t\(.*\) => not found/\1/p' | sort -u | xargs)
    [[ -z $missing ]] || die "the libraries gathered need more that this machine lacks: $missing; install what brings it"
    printf '%s\n' "$recipe" >"$tmp/new/recipe"
    rm -rf "$dir"
    mv -T "$tmp/new" "$dir"
    say "made $dir"
}

ensure() {
    local recipe
    recipe=$({ printf '%s\n' "${wheels[@]}" "${needed[@]}"; cat "$here/stub_libcuda.c"; } | sha256sum | cut -d ' ' -f 1)
    [[ $(uname -sm) == "Linux x86_64" ]] || die "this is $(uname -sm): the libfabric that is gathered here runs on Linux x86_64 only"
    mkdir -p "$(dirname "$dir")"
    [[ -w $(dirname "$dir") ]] || die "$(dirname "$dir") is not writable for you: set LIBFABRIC_DIR to a folder of yours"
    [[ -e $dir/recipe || ! -e $dir ]] || die "$dir exists and was not made by this script: move it away, or set LIBFABRIC_DIR to another folder"
    exec 8>"$(dirname "$dir")/.libfabric.lock"
    flock -w 300 8 || die "another run has held $(dirname "$dir")/.libfabric.lock for 300 s: wait for it, or end it"
    [[ -f $dir/recipe && $(<"$dir/recipe") == "$recipe" ]] || build
    exec 8>&-
}

exports() {
    local path=$dir
    case :${LD_LIBRARY_PATH-}: in
        *":$dir:"*) path=$LD_LIBRARY_PATH ;;
        *) [[ -z ${LD_LIBRARY_PATH-} ]] || path=$dir:$LD_LIBRARY_PATH ;;
    esac
    printf 'export LD_LIBRARY_PATH=%q FI_PROVIDER_PATH=%q FI_PROVIDER=tcp\n' "$path" "$dir"
}

check() {
    local work result=0 pids=() pid
    "$python" -c 'import nixl' || die "$python has no working nixl (above is why): run scripts/setup.sh first, or name another interpreter in PYTHON"
    eval "$(exports)"
    export FI_TCP_IFACE=eth0 LAB=lf$(($$ % 1000000)) LAB_HOSTS="p d"
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the names as they are now
    trap "rm -rf '$work'; '$here/lab.sh' down" EXIT
    "$here/lab.sh" up
    for host in p d; do
        "$here/lab.sh" exec "$host" timeout -k 5 90 "$python" "$here/_libfabric_check.py" "$host" "$work" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || result=$?
    done
    ((result == 0)) || die "LIBFABRIC does not work here (exit code $result; 124 is: no answer in 90 s): the reason is above; NIXL_LOG_LEVEL=INFO scripts/libfabric_cpu.sh check says more"
    say "LIBFABRIC works between two namespaces"
}

case ${1:-build} in
    -h | --help | help) usage ;;
    build) ensure; printf '%s\n' "$dir" ;;
    env) ensure; exports ;;
    check)
        ((EUID == 0)) || die "check makes network namespaces, which needs root: run it with sudo, or as root"
        ensure
        check
        ;;
    *) die "unknown command '$1': see scripts/libfabric_cpu.sh --help" ;;
esac
