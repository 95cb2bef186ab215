#!/usr/bin/env bash
# Sends a sweep of loads through a router to a prefill/decode pair that is up (scripts/serve_pd.sh),
# with vLLM's own serving benchmark: one result file a run, MODE_qpsQ_inI_outO_iterN.json. Runs that
# are there already are kept. Plot them with scripts/plot_push_vs_pull.py.
set -euo pipefail

usage() {
    cat <<'EOU'
Usage: MODE=push|vllm-push|pull PREFILL_IP=A DECODE_IP=B scripts/run_sweep.sh

Environment:
  MODE                  as given to serve_pd.sh (default push)
  PREFILL_IP, DECODE_IP addresses of the two nodes
  MODEL                 checkpoint, for its tokenizer (default Qwen/Qwen3-32B)
  SERVED_MODEL_NAME     name in the API (default Qwen)
  QPS_LIST="1 2 4 8"  INPUT_LENS="1024 2048 4096 8192 16384"  OUTPUT_LENS=128
  NUM_REQS=100  ITERATIONS=10  RESULTS_DIR=./results
  PREFILL_PORT=8100, DECODE_PORT=8200, PROXY_PORT=8000, PREFILL_SIDE_CHANNEL_PORT=5600
  PREFILL_ENGINE_ID=prefill-engine-001, PREFILL_TP_SIZE=8, PREFILL_PP_SIZE=1   (vllm-push only)
  PYTHON                interpreter with vLLM (default: .venv/bin/python, else python3)
  RUN_DIR               pid file and log of the router (default: /tmp/neuron-push-serve-UID)
  HEALTH_TIMEOUT_S      longest wait for the servers and the router (default 300)
  DRY_RUN=1             print the commands, run nothing
EOU
}

say() { printf 'run_sweep.sh: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }
show() { printf 'run_sweep.sh: '; printf '%q ' "$@"; printf '\n'; }

case ${1-} in
    -h | --help) usage; exit 0 ;;
    '') ;;
    *) usage >&2; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mode=${MODE:-push}
[[ $mode == push || $mode == vllm-push || $mode == pull ]] ||
    die "MODE: '$mode' is not allowed; allowed: push, vllm-push, pull"
: "${PREFILL_IP:?run_sweep.sh: PREFILL_IP is not set: the address of the prefill node}"
: "${DECODE_IP:?run_sweep.sh: DECODE_IP is not set: the address of the decode node}"
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python || -n ${PYTHON:-} ]] || python=python3
model=${MODEL:-Qwen/Qwen3-32B}
name=${SERVED_MODEL_NAME:-Qwen}
results=${RESULTS_DIR:-./results}
run_dir=${RUN_DIR:-/tmp/neuron-push-serve-$(id -u)}
proxy_port=${PROXY_PORT:-8000}
side=${PREFILL_SIDE_CHANNEL_PORT:-5600}
prefill=http://$PREFILL_IP:${PREFILL_PORT:-8100}
decode=http://$DECODE_IP:${DECODE_PORT:-8200}
timeout_s=${HEALTH_TIMEOUT_S:-300}
dry=${DRY_RUN:-}

if [[ $mode == push ]]; then
    router=("$python" -m neuron_push router --port "$proxy_port"
        --prefill "$prefill,side=$PREFILL_IP:$side" --decode "$decode")
else
    theirs=$mode
    [[ $mode != pull ]] || theirs=vllm-pull
    router=("$python" -m neuron_push.bench.baseline_router --mode "$theirs" --port "$proxy_port"
        --prefill "$prefill" --decode "$decode" --kv-host "$PREFILL_IP" --kv-port "$side"
        --engine-id "${PREFILL_ENGINE_ID:-prefill-engine-001}"
        --tp-size "${PREFILL_TP_SIZE:-8}" --pp-size "${PREFILL_PP_SIZE:-1}")
fi

started() { awk '{print $22}' "/proc/$1/stat" 2>/dev/null || true; }

wait_health() {
    local begun=$SECONDS
    until curl -fsS -m 5 -o /dev/null "$1/health" 2>/dev/null; do
        ((SECONDS - begun < timeout_s)) || die "$1/health does not answer after $timeout_s s"
        sleep 1
    done
}

end_router() {
    [[ -z ${router_pid-} ]] || kill -TERM "$router_pid" 2>/dev/null || true
    rm -f "$run_dir/proxy.pid"
}

if [[ $dry != 1 ]]; then
    for url in "$prefill" "$decode"; do
        wait_health "$url"
        served=$(curl -fsS -m 10 "$url/v1/models" | python3 -c 'import json,sys; print(" ".join(m["id"] for m in json.load(sys.stdin)["data"]))')
        [[ " $served " == *" $name "* ]] || die "$url serves '$served', not '$name'"
    done
    ! curl -fsS -m 2 -o /dev/null "http://127.0.0.1:$proxy_port/health" 2>/dev/null ||
        die "port $proxy_port is taken: scripts/cleanup.sh proxy ends a router of ours"
fi
show "${router[@]}"
if [[ $dry != 1 ]]; then
    mkdir -p "$run_dir" "$results"
    trap end_router EXIT
    trap 'exit 130' INT TERM
    setsid "${router[@]}" >"$run_dir/proxy.log" 2>&1 </dev/null &
    router_pid=$!
    printf '%s %s\n' "$router_pid" "$(started "$router_pid")" >"$run_dir/proxy.pid"
    wait_health "http://127.0.0.1:$proxy_port"
fi

# Whether a result file is a complete run: there, and no request failed.
is_good() {
    python3 -c 'import json,sys; r=json.load(open(sys.argv[1])); sys.exit(bool(r["failed"]) or not r["completed"])' "$1" 2>/dev/null
}

bad=0
# One iteration of everything before the next: a slow hour spreads over all loads.
for ((iteration = 1; iteration <= ${ITERATIONS:-10}; iteration++)); do
    for qps in ${QPS_LIST:-1 2 4 8}; do
        for input in ${INPUT_LENS:-1024 2048 4096 8192 16384}; do
            for output in ${OUTPUT_LENS:-128}; do
                tag=${mode}_qps${qps}_in${input}_out${output}_iter${iteration}
                if is_good "$results/$tag.json"; then
                    say "$tag.json is there: kept"
                    continue
                fi
                command=("$python" -c 'import sys; from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; p = P(); serve.add_cli_args(p); serve.main(p.parse_args(sys.argv[1:]))'
                    --backend vllm --base-url "http://127.0.0.1:$proxy_port" --model "$name" --tokenizer "$model"
                    --dataset-name random --random-input-len "$input" --random-output-len "$output"
                    --num-prompts "${NUM_REQS:-100}" --request-rate "$qps" --seed "$((iteration * 1000 + input))"
                    --ignore-eos --temperature 0 --percentile-metrics ttft,tpot,itl,e2el
                    --metric-percentiles 50,90,99 --save-result --save-detailed
                    --result-dir "$results" --result-filename "part_$tag.json")
                show "${command[@]}"
                [[ $dry != 1 ]] || continue
                if "${command[@]}" >"$results/$tag.log" 2>&1 && is_good "$results/part_$tag.json"; then
                    mv "$results/part_$tag.json" "$results/$tag.json"
                else
                    say "$tag: failed, or with failed requests: $results/$tag.log" >&2
                    bad=1
                fi
            done
        done
    done
done
exit "$bad"
