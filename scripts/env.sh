#!/usr/bin/env bash
# Build the environment in .venv, or return at once when it is current: same project metadata, same pins, same Python,
# same place. The install is editable, so a changed source file never needs a new one.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/stamp
LOG=$VENV/install.log
# what pip says when the index cannot be reached
UNREACHABLE='NewConnectionError|NameResolutionError|Connect(ion)?(Timeout|Error|Reset)|ReadTimeout|ProxyError|SSLError'
UNREACHABLE="$UNREACHABLE|Connection broken|IncompleteRead|Max retries"

fail() {
    echo "error: $1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON does not exist; name a Python 3.10 or newer."
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.10 or newer; name one that is."
        return
    fi
    for PYTHON in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if new_enough "$PYTHON"; then return; fi
    done
    fail "no Python 3.10 or newer was found; install one, or name it: make PYTHON=/path/to/python3"
}

fingerprint() {
    "$PYTHON" - <<'PY'
import hashlib, os, sys
digest = hashlib.sha256(repr((sys.version_info[:3], os.getcwd())).encode())
for name in ("pyproject.toml", "constraints.txt"):
    with open(name, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())
PY
}

create() {
    echo "[1/3] creating $VENV with $("$PYTHON" --version)"
    if ! "$PYTHON" -m venv --clear "$VENV" >/dev/null 2>&1 || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$VENV"
        fail "$PYTHON cannot create an environment with pip; install its venv module (Debian or Ubuntu: apt install python3-venv)."
    fi
}

# pip's log goes to a file; of what it says, only what shows progress reaches the screen
pip_install() {
    if ! "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --constraint constraints.txt "$@" 2>&1 |
        tee -a "$LOG" | awk '/^ *(Downloading|Installing collected)/ { print "      " substr($0, 1, 100); fflush() }'; then
        if grep -qE "$UNREACHABLE" "$LOG"; then
            fail "the package index cannot be reached; connect to the network and try again (pip's log: $LOG)."
        fi
        tail -n 5 "$LOG" >&2
        fail "installing the packages failed (pip's log: $LOG)."
    fi
}

find_python
WANTED=$(fingerprint)
if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANTED" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    exit 0
fi
create
echo "[2/3] installing pip and setuptools"
pip_install pip setuptools
echo "[3/3] installing sglang and its packages (the first time this takes some minutes)"
pip_install --no-build-isolation --editable '.[test]'
echo "$WANTED" >"$STAMP"
echo "      environment ready"
