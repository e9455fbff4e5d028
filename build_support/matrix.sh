#!/usr/bin/env bash
# Builds a wheel for each Python that is installed and tries it with each torch, as check_wheel.py does.
# Prints one line per pair; a pair without an interpreter, or without such a torch for it, is reported and left out.
#
#   build_support/matrix.sh            PYTHONS="3.12" TORCHES="2.11.0 2.13.0" build_support/matrix.sh
set -uo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
line() { printf '| %s | %s | %s |\n' "$@" | tee -a "$work/table"; }

for python in ${PYTHONS:-3.11 3.12 3.13 3.14}; do
    if ! "python$python" -c '' 2>/dev/null; then
        line "$python" "all" "not run: no interpreter"
        continue
    fi
    wheel=
    for torch in ${TORCHES:-2.13.0 2.11.0 2.15.0}; do
        venv=$work/$python-$torch
        "python$python" -m venv "$venv"
        if ! "$venv/bin/pip" download --quiet --no-deps --dest "$work/torch" "torch==$torch" >/dev/null 2>&1; then
            line "$python" "$torch" "not run: no such torch for this Python"
            continue
        fi
        if [ -z "$wheel" ]; then  # by the first torch; it serves the others too
            "$venv/bin/pip" install --quiet "torch==$torch" "setuptools>=77" "pybind11>=2.13" ninja numpy
            "$venv/bin/python" build_support/check_wheel.py --out "$work/$python" --torch "$torch"
            status=$?
            wheel=$(ls "$work/$python"/*.whl 2>/dev/null)
        else
            "$venv/bin/python" build_support/check_wheel.py --wheel "$wheel" --torch "$torch"
            status=$?
        fi
        [ "$status" = 0 ] && line "$python" "$torch" "passed" || { line "$python" "$torch" "FAILED"; failed=1; }
        rm -rf "$venv"
    done
done
printf '\n| Python | torch | wheel |\n|---|---|---|\n'
cat "$work/table"
exit "$failed"
