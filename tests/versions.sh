#!/usr/bin/env bash
# The tests that matter, with the versions that README and pyproject name: each row gets a fresh
# environment, in a temporary folder that goes away. Prints a table in README's form, and below it
# what failed. As arguments, other rows: TORCH,PYTHON,IPYKERNEL,IPYPARALLEL, each a version, its
# beginning, or "newest". Without a GPU, UV_TORCH_BACKEND=cpu saves some gigabytes where torch's own
# index is reached. VERSIONS_TESTS names other tests.
set -uo pipefail

cd "$(dirname "$0")/.."
rows=("$@")
((${#rows[@]})) || rows=(
  2.8,3.11,6.29,9.0 2.8,3.12,7,9.2
  2.11,3.11,7,9.2 2.11,3.13,6.29,9.0
  2.13,3.11,7,9.2 2.13,3.12,6.29,9.2
  newest,3.11,6.29,9.0 newest,3.12,7,9.2 newest,3.13,7,9.2
)
# Start, hang, why, abort, step, lines, bench, run, prepared jobs, save; and what is private in torch.
tests=${VERSIONS_TESTS:-$(printf ' tests/contract/test_%s.py' setup quiescence after_a_hang why abort \
  stepping_and_abort lines bench_loop step_bench scripts as_torchrun prepared save wrap subgroups silent observer private_api)}
work=$(mktemp -d /tmp/versions-XXXXXX)
trap 'rm -rf "$work"' EXIT

wants() { # NAME VERSION: as a requirement
  if [[ $2 == newest ]]; then echo "$1"; else echo "$1==$2.*"; fi
}

python_of() { # VERSION: where it is
  UV_PYTHON_DOWNLOADS=never uv python find "$1" 2>/dev/null ||
    { "python$1" -c "" && command -v "python$1"; } 2>/dev/null
}

environment() { # PYTHON REQUIREMENT...: a new one in $work/venv
  local python=$1
  shift
  set -- "$@" -e . pytest pytest-rerunfailures pytest-timeout pytest-xdist nbclient scikit-learn
  rm -rf "$work/venv"
  if command -v uv >/dev/null; then
    uv venv -q -p "$python" "$work/venv" &&
      uv pip install -q --python "$work/venv/bin/python" "$@"
  else
    "$python" -m venv "$work/venv" && "$work/venv/bin/pip" install -q "$@"
  fi
}

table=() failures=() status=0
for row in "${rows[@]}"; do
  IFS=, read -r torch python ipykernel ipyparallel <<<"$row"
  echo "=== $row" >&2
  if ! at=$(python_of "$python"); then
    table+=("| $torch | $python | $ipykernel | $ipyparallel | not run: no Python $python here | |")
    continue
  fi
  if ! environment "$at" "$(wants torch "$torch")" "$(wants ipykernel "$ipykernel")" \
    "$(wants ipyparallel "$ipyparallel")" >"$work/log" 2>&1; then
    table+=("| $torch | $python | $ipykernel | $ipyparallel | not run: $(tail -n 1 "$work/log") | |")
    status=1
    continue
  fi
  # shellcheck disable=SC2086  # the tests are words
  PATH=$work/venv/bin:$PATH nice "$work/venv/bin/python" -m pytest -q -n 2 --dist loadfile \
    --reruns 1 -p no:cacheprovider $tests >"$work/log" 2>&1 || status=1
  have=$("$work/venv/bin/python" - <<'END'
import platform
from importlib.metadata import version
print(version("torch"), platform.python_version(), version("ipykernel"), version("ipyparallel"), sep=" | ")
END
  )
  counts=$(tail -n 1 "$work/log" | grep -oE '[0-9]+ (passed|failed|error)' | paste -sd, | sed 's/,/, /g')
  table+=("| $have | ${counts:-$(tail -n 1 "$work/log")} | $(date -u +%F) |")
  failures+=("$(grep -E '^(FAILED|ERROR|FLAKY)' "$work/log" | sed "s/^/$row: /")")
done

printf '| torch | Python | ipykernel | ipyparallel | tests | date |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${table[@]}"
printf '%s\n' "${failures[@]}" | sed '/^$/d'
exit "$status"
