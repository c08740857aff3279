#!/usr/bin/env bash
# The whole check: format, lint, types, tests. Arguments go to pytest: ./launch/test.sh tests/config -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

ruff format --check --quiet .
ruff check --quiet .
mypy
# exec: pytest's closing line is the last one, and its exit code is the script's.
exec python -m pytest --durations=10 --durations-min=5 "$@"
