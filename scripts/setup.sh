#!/bin/sh
# Make the virtual environment: PYTHON (default python3), VENV (default .venv). Run by `make setup`.
# TORCH_INDEX_URL: where to take torch from, for a build other than your index's default (see CONTRIBUTING.md).
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

# Debian packages: those whose programs are missing, and only where they can be installed without asking.
missing=
need() { missing="$missing $1"; }
command -v unshare >/dev/null 2>&1 && command -v nsenter >/dev/null 2>&1 || need util-linux
command -v ip >/dev/null 2>&1 && command -v tc >/dev/null 2>&1 || need iproute2
command -v "$PYTHON" >/dev/null 2>&1 || need python3
"$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 || need python3-venv
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing Debian packages:$missing"
        log=$(mktemp)
        # shellcheck disable=SC2086  # a list of names
        if ! { DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
               DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing; } \
               >"$log" 2>&1 </dev/null; then
            cat "$log" >&2
            rm -f "$log"
            exit 1
        fi
        rm -f "$log"
    else
        say "missing Debian packages:$missing (some tests will be skipped; install them as root)"
    fi
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { say "Python >= 3.10 is needed, $PYTHON is $("$PYTHON" -V 2>&1)"; exit 1; }

if [ ! -x "$VENV/bin/python" ]; then
    say "making $VENV with $("$PYTHON" -V 2>&1)"
    "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --quiet --quiet --no-input --disable-pip-version-check "$@"; }

say "installing into $VENV (a few minutes the first time)"
# torch first and by itself: resolved together with the rest it could come as another build.
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    pip install -c constraints.txt --index-url "$TORCH_INDEX_URL" torch==2.13.0
else
    pip install -c constraints.txt torch==2.13.0
fi
pip install -c constraints.txt -e '.[dev,examples]'
say "done: $("$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)')"
