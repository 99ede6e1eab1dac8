#!/bin/sh
# Finds a Python that gmeta supports and runs setup_env.py with it. PYTHON= names one. With TENSORFLOW=, a
# version, it runs setup_tensorflow.py, with any Python that a TensorFlow of the range supports.
#
# A candidate counts only if it runs: version managers leave shims on PATH for missing versions.
set -eu
cd "$(dirname -- "$0")/../.."

if [ -n "${TENSORFLOW:-}" ]; then
  environment="build/tensorflow/$TENSORFLOW/venv" versions='3.10, 3.11, 3.12 or 3.13'
else
  environment=.venv versions='3.10, 3.11 or 3.12'
fi
version='import sys; print("%d.%d" % sys.version_info[:2])'
version_of() { "$1" -c "$version" </dev/null 2>/dev/null || true; }
supported() {
  case "$(version_of "$1")" in
    3.10 | 3.11 | 3.12) return 0 ;;
    3.13) [ -n "${TENSORFLOW:-}" ] ;;
    *) return 1 ;;
  esac
}
# Searches all of PATH for each name: after a shim that fails there may be one that runs.
first_python() (
  IFS=:
  for name in python3.11 python3.12 python3.10 python3.13 python3; do
    for folder in $PATH; do
      if [ -x "$folder/$name" ] && supported "$folder/$name"; then
        echo "$folder/$name"
        return
      fi
    done
  done
)
fail() {
  echo "setup: error: $1" >&2
  exit 1
}
advice='install one (Debian: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.11'

if [ -n "${PYTHON:-}" ]; then
  if ! supported "$PYTHON"; then
    found=$(version_of "$PYTHON")
    if [ -n "$found" ]; then found="is Python $found"; else found="does not run"; fi
    fail "PYTHON=$PYTHON $found, but gmeta needs Python $versions; $advice"
  fi
elif [ -f "$environment/.setup/venv" ] && supported "$environment/bin/python"; then
  PYTHON=$environment/bin/python # an existing environment keeps its Python, whatever is on PATH
else
  PYTHON=$(first_python)
  [ -n "$PYTHON" ] || fail "no Python $versions that runs is on PATH; $advice"
fi
if [ -n "${TENSORFLOW:-}" ]; then exec "$PYTHON" tools/dev/setup_tensorflow.py "$TENSORFLOW" "$@"; fi
exec "$PYTHON" tools/dev/setup_env.py
