#!/bin/sh
# Turns the environment into options of planaria, and becomes its process, so that signals reach it.
# Invites and tokens planaria reads from there itself, so that no list of processes shows them.
# Options on the command line come last and win. TLS files and run file have to be mounted.
set -eu

command=${1:-node}
[ $# -eq 0 ] || shift

case $command in
node)
    : "${PLANARIA_JOIN:?set it to an invite, or to the HOST:PORT of the registry}"
    set -- ${PLANARIA_STAGE:+--stage "$PLANARIA_STAGE"} \
        ${PLANARIA_ADVERTISE:+--advertise "$PLANARIA_ADVERTISE"} \
        ${PLANARIA_DEVICE:+--device "$PLANARIA_DEVICE"} \
        ${PLANARIA_DATA:+--data "$PLANARIA_DATA"} \
        ${PLANARIA_OUT:+--out "$PLANARIA_OUT"} \
        ${PLANARIA_SAVE_DIR:+--save-dir "$PLANARIA_SAVE_DIR"} "$@"
    ;;
bootstrap)
    set -- --run "${PLANARIA_RUN:?set it to the path of the run file}" \
        ${PLANARIA_JOURNAL:+--journal "$PLANARIA_JOURNAL"} "$@"
    ;;
*)
    exec planaria "$command" "$@"
    ;;
esac

exec planaria "$command" --listen "$PLANARIA_LISTEN" \
    ${PLANARIA_INSECURE:+--insecure} \
    ${PLANARIA_TLS_CA:+--tls-ca "$PLANARIA_TLS_CA"} \
    ${PLANARIA_TLS_CERT:+--tls-cert "$PLANARIA_TLS_CERT"} \
    ${PLANARIA_TLS_KEY:+--tls-key "$PLANARIA_TLS_KEY"} "$@"
