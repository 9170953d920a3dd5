#!/bin/sh
# Builds the CPU image, runs the swarm of compose.yaml, kills the only node of stage 2 and then the
# registry, each with SIGKILL, and shows that training goes on and that no sample was lost.
#
#   docker/check.sh
#   ENGINE=podman COMPOSE=podman-compose docker/check.sh
#
# BUILD_OPTIONS are handed to `$ENGINE build`, for instance "--build-arg TORCH_INDEX=URL".
set -eu
cd "$(dirname "$0")/.."

ENGINE=${ENGINE:-docker}
COMPOSE=${COMPOSE:-$ENGINE compose}
PYTHON=${PYTHON:-python3}

compose() {
    timeout 120 $COMPOSE -p planaria-check -f docker/compose.yaml "$@"
}

say() {
    printf '\n== %s\n' "$*"
}

finish() {
    status=$?
    trap - EXIT
    if [ $status -ne 0 ]; then
        say "failed; the containers' last words"
        compose logs --tail 20 || true
    fi
    compose down -v >/dev/null 2>&1 || echo "could not remove the containers of planaria-check" >&2
    exit $status
}

# The value of a Python expression over `run`, the registry's description.
ask() {
    compose exec -T registry planaria status --join localhost:7400 --json 2>/dev/null |
        $PYTHON -c "import json, sys; run = json.load(sys.stdin); print($1)"
}

committed() {
    ask 'max(int(one["report"]["committed"]) for one in run["members"])' 2>/dev/null || echo 0
}

at_least() {
    [ "$(committed)" -ge "$1" ]
}

healthy() {
    $ENGINE exec "$1" healthcheck.py
}

# await SECONDS WHAT COMMAND...: until COMMAND succeeds; prints the seconds that it took.
await() {
    begun=$(date +%s) patience=$1 what=$2
    shift 2
    until "$@"; do
        if [ $(($(date +%s) - begun)) -ge "$patience" ]; then
            echo "waited $patience s for $what, in vain" >&2
            exit 1
        fi
        sleep 1
    done
    echo "$what: after $(($(date +%s) - begun)) s"
}

# In one container only, by the name that compose gives to the first.
container() {
    compose ps -q "$1" | head -n 1
}

trap finish EXIT
trap 'exit 130' INT TERM

say "build"
# shellcheck disable=SC2086  # several options
$ENGINE build ${BUILD_OPTIONS:-} -f docker/Dockerfile --target cpu -t planaria:cpu .
$ENGINE image inspect --format '{{.Size}} bytes' planaria:cpu

say "start a registry, a node for stage 0, four nodes for the body"
compose run --rm -T data
compose up -d
await 120 "step 20 committed" at_least 20
for id in $(compose ps -q); do
    [ "$($ENGINE inspect --format '{{.State.Running}}' "$id")" = true ] || continue
    await 30 "$id is healthy" healthy "$id"
done

say "kill the only node of stage 2, start its container again"
victim=$(ask 'next(m["host"] for m in run["view"]["members"] if m.get("stage") == 2)')
before=$(committed)
$ENGINE kill -s KILL "$victim"
$ENGINE start "$victim"
await 90 "step $((before + 20)) committed, after $before" at_least $((before + 20))
ask '*run["decisions"][-6:], sep="\n"'

say "kill the registry: training goes on without; start it again"
registry=$(container registry)
before=$(committed)
view=$(ask 'run["view"]["number"]')
$ENGINE kill -s KILL "$registry"
sleep 10
$ENGINE start "$registry"
await 90 "step $((before + 20)) committed, after $before" at_least $((before + 20))
[ "$(ask 'run["view"]["number"]')" -ge "$view" ]

say "audit"
compose exec -T stage-0 planaria audit state

say "healed"
