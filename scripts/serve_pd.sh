#!/usr/bin/env bash
# Starts one vLLM server of a prefill/decode pair, waits until it answers, and leaves it running.
# End it with scripts/cleanup.sh server.
set -euo pipefail

usage() {
    cat <<'EOU'
Usage: ROLE=prefill|decode MODE=push|vllm-push|pull PREFILL_IP=A DECODE_IP=B scripts/serve_pd.sh

Environment:
  ROLE                prefill or decode
  MODE                push (neuron_push, the default), vllm-push or pull (vLLM's NIXL connectors)
  PREFILL_IP, DECODE_IP   addresses of the two nodes
  MODEL               checkpoint (default Qwen/Qwen3-32B)
  SERVED_MODEL_NAME   name in the API (default Qwen)
  TP                  tensor-parallel size (default 8; TP_SIZE is read too)
  BACKEND             NIXL backend (default LIBFABRIC)
  KV_DEVICE           where vLLM's NIXL connectors find the KV cache (default cuda; cpu on a CPU)
  MAX_MODEL_LEN=32768, MAX_NUM_SEQS=8
  PREFILL_PORT=8100, DECODE_PORT=8200     HTTP ports
  SIDE_CHANNEL_PORT=5600                  the node's side channel
  EXTRA_CONFIG        JSON object of further kv_connector_extra_config options
  EXTRA_ARGS          further arguments of vLLM's server, separated by spaces
  PYTHON              interpreter with vLLM (default: .venv/bin/python, else python3)
  RUN_DIR             pid files and logs (default: /tmp/neuron-push-serve-UID)
  START_TIMEOUT_S     longest wait for /health (default 1800)
  DRY_RUN=1           print the command, start nothing
MODE=push on an address other hosts reach needs a network that keeps strangers out: it sets
`insecure: true`, because this script does not make keys.
EOU
}

say() { printf 'serve_pd.sh: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }

case ${1-} in
    -h | --help) usage; exit 0 ;;
    '') ;;
    *) usage >&2; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
role=${ROLE:-}
mode=${MODE:-push}
[[ $role == prefill || $role == decode ]] || die "ROLE: '$role' is not allowed; allowed: prefill, decode"
[[ $mode == push || $mode == vllm-push || $mode == pull ]] ||
    die "MODE: '$mode' is not allowed; allowed: push, vllm-push, pull"
: "${PREFILL_IP:?serve_pd.sh: PREFILL_IP is not set: the address of the prefill node}"
: "${DECODE_IP:?serve_pd.sh: DECODE_IP is not set: the address of the decode node}"

python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python || -n ${PYTHON:-} ]] || python=python3
model=${MODEL:-Qwen/Qwen3-32B}
name=${SERVED_MODEL_NAME:-Qwen}
backend=${BACKEND:-LIBFABRIC}
side=${SIDE_CHANNEL_PORT:-5600}
run_dir=${RUN_DIR:-/tmp/neuron-push-serve-$(id -u)}
timeout_s=${START_TIMEOUT_S:-1800}

if [[ $role == prefill ]]; then
    host=$PREFILL_IP port=${PREFILL_PORT:-8100} kv_role=kv_producer engine=prefill-engine-001
else
    host=$DECODE_IP port=${DECODE_PORT:-8200} kv_role=kv_consumer engine=decode-engine-001
fi

config=$(
    ENGINE=$engine KV_ROLE=$kv_role MODE=$mode HOST=$host SIDE=$side BACKEND=$backend \
        KV_DEVICE=${KV_DEVICE:-cuda} EXTRA_CONFIG=${EXTRA_CONFIG:-} python3 - <<'PY'
import json, os

env = os.environ
extra = {"backends": [env["BACKEND"]]}
config = {"engine_id": env["ENGINE"], "kv_role": env["KV_ROLE"]}
if env["MODE"] == "push":
    config["kv_connector"] = "NeuronPushConnector"
    config["kv_connector_module_path"] = "neuron_push.connector"
    extra |= {"side_channel_host": env["HOST"], "side_channel_port": int(env["SIDE"])}
    if env["HOST"] not in ("127.0.0.1", "localhost", "::1"):
        extra["insecure"] = True
else:
    config["kv_connector"] = {"vllm-push": "NixlPushConnector", "pull": "NixlConnector"}[env["MODE"]]
    config["kv_buffer_device"] = env["KV_DEVICE"]
extra |= json.loads(env["EXTRA_CONFIG"] or "{}")
config["kv_connector_extra_config"] = extra
print(json.dumps(config))
PY
)

export VLLM_NIXL_SIDE_CHANNEL_HOST=$host VLLM_NIXL_SIDE_CHANNEL_PORT=$side
if [[ $backend == LIBFABRIC ]]; then
    export FI_PROVIDER=${FI_PROVIDER:-efa}
fi
# Not `vllm serve`: that command looks up a distribution named vllm, which CPU builds are not.
command=(
    "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$name"
    --host "$host" --port "$port" --tensor-parallel-size "${TP:-${TP_SIZE:-8}}"
    --max-model-len "${MAX_MODEL_LEN:-32768}" --max-num-seqs "${MAX_NUM_SEQS:-8}"
    --kv-transfer-config "$config"
)
[[ $role == prefill ]] || command+=(--no-enable-prefix-caching)
read -r -a more <<<"${EXTRA_ARGS:-}"
command+=("${more[@]}")

say "VLLM_NIXL_SIDE_CHANNEL_HOST=$host VLLM_NIXL_SIDE_CHANNEL_PORT=$side${FI_PROVIDER:+ FI_PROVIDER=$FI_PROVIDER}"
printf 'serve_pd.sh: '
printf '%q ' "${command[@]}"
printf '\n'
if [[ ${DRY_RUN:-} == 1 ]]; then
    exit 0
fi

mkdir -p "$run_dir"
pid_file=$run_dir/server-$role.pid
log=$run_dir/server-$role.log
# A pid file names the process and its start time, so that a reused pid is not taken for ours.
started() { awk '{print $22}' "/proc/$1/stat" 2>/dev/null || true; }
if [[ -f $pid_file ]]; then
    read -r old_pid old_start <"$pid_file"
    [[ $(started "$old_pid") != "$old_start" ]] ||
        die "a $role server of ours runs already (pid $old_pid): scripts/cleanup.sh server ends it"
fi
setsid "${command[@]}" >"$log" 2>&1 </dev/null &
pid=$!
printf '%s %s\n' "$pid" "$(started "$pid")" >"$pid_file"
say "pid $pid, log $log"

url=http://$host:$port
begun=$SECONDS
until curl -fsS -m 5 -o /dev/null "$url/health" 2>/dev/null; do
    kill -0 "$pid" 2>/dev/null || { tail -n 30 "$log" >&2; rm -f "$pid_file"; die "the server ended; its log: $log"; }
    ((SECONDS - begun < timeout_s)) || die "$url/health does not answer after $timeout_s s; it is left running (pid $pid), its log: $log"
    sleep 1
done
served=$(curl -fsS -m 10 "$url/v1/models" | python3 -c 'import json,sys; print(" ".join(m["id"] for m in json.load(sys.stdin)["data"]))')
[[ " $served " == *" $name "* ]] || die "$url serves '$served', not '$name': another server is on this port"
say "$role ready at $url after $((SECONDS - begun)) s, serving $name"
