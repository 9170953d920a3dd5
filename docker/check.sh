#!/bin/sh
# Builds the CPU image and runs the swarm of compose.yaml. A node with the body's invite asks for
# stage 0, and must be refused. All nodes of stage 2 are killed, then the registry, each with SIGKILL.
# Training must go on after each, and no sample may be lost.
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
    timeout 600 $COMPOSE -p planaria-check -f docker/compose.yaml "$@"
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

# The value of a Python expression over `run`, what `planaria status` tells.
ask() {
    compose exec -T registry planaria status --join @authority/operator.invite --json 2>/dev/null |
        $PYTHON -c "import json, sys; run = json.load(sys.stdin); print($1)"
}

# The same over `events`, what the node of stage 0 wrote down.
recall() {
    compose exec -T stage-0 sh -c 'cat state/events-*.jsonl' |
        $PYTHON -c "import json, sys; events = [json.loads(line) for line in sys.stdin]; print($1)"
}

# The newest committed step; fails if the registry doesn't answer.
committed() {
    ask 'max(int(seat["committed"]) for one in run["members"] for seat in one["report"]["seats"])' 2>/dev/null
}

at_least() {
    step=$(committed) && [ "$step" -ge "$1" ]
}

# The members, by node; only those that the registry has heard of since its start.
nodes() {
    ask '*sorted(one["member"]["node"] for one in run["members"] if one["report"]["seats"])' || true
}

known() {
    [ "$(nodes)" = "$1" ]
}

# await SECONDS WHAT COMMAND...: until COMMAND succeeds.
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
    echo "$what after $(($(date +%s) - begun)) s"
}

trap finish EXIT
trap 'exit 130' INT TERM

say "build"
# shellcheck disable=SC2086  # several options
$ENGINE build ${BUILD_OPTIONS:-} -f docker/Dockerfile --target cpu -t planaria:cpu .
$ENGINE image inspect --format '{{.Size}} bytes' planaria:cpu

say "start a registry, a node for stage 0, four nodes for the body"
compose down -v >/dev/null 2>&1 || true
compose run --rm -T data
compose up -d
await 300 "step 20 committed" at_least 20
for id in $(compose ps -q); do
    service=$($ENGINE inspect --format '{{index .Config.Labels "com.docker.compose.service"}}' "$id")
    case $service in
    registry | stage-0 | body) await 120 "$service ($id) healthy" "$ENGINE" exec "$id" healthcheck.py ;;
    esac
done

say "ask for stage 0 with the body's invite"
invite=$(compose exec -T registry cat authority/node.invite)
if refusal=$(compose run --rm -T -e "PLANARIA_JOIN=$invite" stage-0 2>&1); then
    echo "a node that is not the owner's got stage 0" >&2
    exit 1
fi
echo "$refusal" | grep "only nodes of the run's owner serve stage 0"

say "kill all nodes of stage 2, start their containers again"
victims=$(ask '*(one["host"] for one in run["view"]["members"] for seat in one["seats"] if seat["stage"] == 2)')
before=$(committed)
killed=$(date +%s)
# shellcheck disable=SC2086  # one or two nodes
$ENGINE kill -s KILL $victims
# shellcheck disable=SC2086
$ENGINE start $victims
await 300 "step $((before + 20)) committed, $before when killed," at_least $((before + 20))
recall 'next("rebuilt by {method} at step {step}; steps waited {stall_seconds:.2f} s".format(**one)
             for one in events if one["kind"] == "rebuilt" and one["time"] > '"$killed)"

say "kill the registry, start it again after 10 s"
registry=$(compose exec -T registry cat /etc/hostname)
members=$(nodes)
$ENGINE kill -s KILL "$registry"
killed=$(date +%s)
sleep 10
alone=$(recall "sum(one['kind'] == 'committed' and one['time'] > $killed + 1 for one in events)")
echo "$alone steps committed without a registry"
[ "$alone" -gt 0 ]
$ENGINE start "$registry"
await 300 "the same nodes known to the registry" known "$members"

say "audit"
compose exec -T stage-0 planaria audit state

say "healed"
