#!/usr/bin/env bash
# No CUDA before the fork, with a CUDA build of torch, on a machine without a GPU: a fresh environment
# in a temporary folder that goes away (6 GB), and `python -m tests.gpu.before_fork` in it. As arguments
# a version of torch, and further modules to run there, each with its options: "pytest -q tests/…".
# Where torch cannot be installed within LIMIT_S seconds it says so and is no failure.
set -uo pipefail

cd "$(dirname "$0")/.."
torch=${1:-2.13.0}
shift
work=$(mktemp -d /tmp/cuda-build-XXXXXX)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
# "===" compares as texts: 2.13.0+cpu is another.
if ! timeout "${LIMIT_S:-180}" "$work/venv/bin/pip" install -q "torch===$torch" -e . \
  pytest pytest-rerunfailures pytest-timeout pytest-xdist nbclient >"$work/log" 2>&1; then
  echo "not run: torch $torch for CUDA was not installed ($(tail -n 1 "$work/log")) within $SECONDS s"
  exit 0
fi
echo "torch $torch for CUDA, installed within $SECONDS s"
status=0
for module in tests.gpu.before_fork "$@"; do
  # shellcheck disable=SC2086  # the options are words
  PATH=$work/venv/bin:$PATH python -m $module || status=1
done
echo "$SECONDS s"
exit "$status"
