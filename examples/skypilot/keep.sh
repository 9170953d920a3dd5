#!/bin/sh
# Keeps so many nodes alive as managed jobs, until Ctrl-C; the nodes stay then.
#
#   examples/skypilot/keep.sh 8
#   sky jobs cancel -y -n planaria      # end them
#
# SkyPilot itself replaces an instance that was taken. This replaces jobs that have failed for good,
# such as those that no instance was found for. EVERY is the seconds between two looks.
set -eu

wanted=${1:?how many nodes}
name=${NAME:-planaria}
here=$(dirname "$0")

while :; do
    alive=$(sky jobs queue --skip-finished | grep -cw "$name" || true)
    echo "$(date +%T) $alive of $wanted nodes"
    while [ "$alive" -lt "$wanted" ]; do
        sky jobs launch -y -d -n "$name" --secret PLANARIA_JOIN "$here/node.yaml"
        alive=$((alive + 1))
    done
    sleep "${EVERY:-60}"
done
