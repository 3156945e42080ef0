# Sourced by the other scripts: makes .venv with the pinned dependencies, once. Argument: the extras to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed and was not found: install it, or name it with PYTHON=/path/to/python3"
}

check_space() {
  local free_mb
  free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
  [[ "$free_mb" -ge 3000 ]] || fail "only $free_mb MB are free on this disk, the environment needs 3000 MB: make room and run again"
}

make_environment() {
  local extras=$1 stamp wanted
  stamp=.venv/.installed-$extras
  wanted=$(cat pyproject.toml constraints.txt | cksum)
  [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && return
  local python
  python=$(find_python)
  check_space
  echo "installing into .venv (a few minutes the first time, nothing the next)" >&2
  [[ -x .venv/bin/python ]] || "$python" -m venv .venv || fail "$python cannot make a virtual environment: install its venv module"
  # torch is pinned to a version, not to a build: PyPI's for Linux has CUDA in it (5 GB), the one of PyTorch's CPU index
  # (PIP_EXTRA_INDEX_URL, see docs/guides/install.md) has not, and is preferred where pip is told of it.
  .venv/bin/python -m pip install -qq --progress-bar off -c constraints.txt -e ".[$extras]" >&2 ||
    fail "the dependencies could not be installed: the lines above name the cause; then run this again"
  .venv/bin/python -m compileall -q .venv/lib/python3*/site-packages/{transformers/models/llama,grpc,typer,rich} >/dev/null 2>&1 || true
  echo "$wanted" >"$stamp"
}
