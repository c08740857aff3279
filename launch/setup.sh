#!/usr/bin/env bash
# Makes .venv with the packages of requirements.txt and the `mdsp` command. Does nothing when they are already there.
# PYTHON=python3.12 ./launch/setup.sh chooses the interpreter of a new environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The stamp is written last, so an interrupted installation is taken up again.
stamp=.venv/mdsp-requirements.sha256
wanted=$(cat requirements.txt pyproject.toml | sha256sum | cut -d' ' -f1)
if [[ -x .venv/bin/mdsp && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

# Two scripts started together must not install into the same environment at the same time.
exec 9<requirements.txt
command -v flock >/dev/null && flock 9

if [[ ! -x .venv/bin/python ]]; then
    if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup: Python 3.11 or newer is needed; PYTHON=python3.12 $0 chooses one" >&2
        exit 2
    fi
    echo "setup: creating .venv with $("${PYTHON:-python3}" --version)"
    "${PYTHON:-python3}" -m venv .venv
fi
echo "setup: installing requirements.txt (the first time takes some minutes)"
.venv/bin/python -m pip install -qq --disable-pip-version-check -r requirements.txt
echo "setup: installing the mdsp command"
# The build tool is pinned in requirements.txt, so nothing has to be fetched for an isolated build.
# compat: a plain path entry, which costs the start of Python nothing.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings editable_mode=compat --editable .
echo "$wanted" >"$stamp"
echo "setup: done"
