#!/usr/bin/env bash
# Makes .venv and installs Rorqual into it, editable, at the versions of constraints.txt.
# Environment: PYTHON (default python3), TORCH_INDEX (an index to take torch from; empty: pip's own).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-}
venv_python=.venv/bin/python

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: '$PYTHON' is not Python 3.11 or later; name one with make ... PYTHON=python3.12" >&2
    exit 1
fi

# A venv that an interrupted set-up left without pip is made again.
if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    # Some systems ship Python without ensurepip: let the system's pip put one into the bare environment.
    if ! "$PYTHON" -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        "$PYTHON" -m venv --without-pip .venv
        "$PYTHON" -m pip --python "$venv_python" install pip
    fi
fi

pip_install=("$venv_python" -m pip install --disable-pip-version-check)
if [ -n "${CI:-}" ]; then
    pip_install+=(--progress-bar off)
fi

if [ -n "$TORCH_INDEX" ]; then
    "${pip_install[@]}" --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
fi
"${pip_install[@]}" --editable '.[dev]' --constraint constraints.txt
