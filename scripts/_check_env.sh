# Sourced by check_gpu.sh and check_trainium.sh: which interpreter, and where it finds the project.
# Sets `python` and PYTHONPATH. `root` is the repository; `die` ends the script.

# check_python WHEELS PACKAGE...: from wheels if a folder is given, else what PYTHON names.
check_python() {
    local folder=$1
    shift
    python=${PYTHON:-}
    if [[ -n $folder ]]; then
        [[ -d $folder ]] || die "--wheels $folder is no directory"
        local venv=$root/.work/check-venv
        [[ -x $venv/bin/python ]] || "${python:-python3}" -m venv "$venv" ||
            die "could not make $venv: install the venv module, or name another Python in PYTHON"
        "$venv/bin/python" -m pip install -q --no-index --find-links "$folder" "$@" ||
            die "the wheels in $folder do not satisfy: $*"
        python=$venv/bin/python
    elif [[ -z $python ]]; then
        python=$root/.venv/bin/python
        [[ -x $python ]] || python=python3
    fi
    # The GPU backend's folder is called gpu, its import name neuron_push_gpu.
    mkdir -p "$root/.work/path"
    ln -sfn "$root/gpu" "$root/.work/path/neuron_push_gpu"
    export PYTHONPATH=$root:$root/.work/path${PYTHONPATH:+:$PYTHONPATH}
    "$python" -c 'import msgspec, numpy, zmq' 2>/dev/null ||
        die "$python lacks numpy, msgspec or pyzmq: run scripts/setup.sh, pass --wheels, or name an interpreter in PYTHON"
}
