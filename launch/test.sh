#!/usr/bin/env bash
# The whole check: format, lint, types, tests. Arguments go to pytest: ./launch/test.sh tests/config -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
# The report page is tested in a real browser. A container can install it; elsewhere those tests say what is missing.
if ! command -v chromium chromium-browser google-chrome >/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "test: installing Chromium"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || true
fi
export PATH="$PWD/.venv/bin:$PATH"

ruff format --check --quiet .
ruff check --quiet .
mypy
# exec: pytest's closing line is the last one, and its exit code is the script's.
exec python -m pytest --durations=10 --durations-min=5 "$@"
