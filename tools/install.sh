#!/bin/sh
# Make the virtual environment $1 and install the workbench with the extra $2 into it: demo to run it, dev to work on it.
#
# PYTHON: interpreter to use (default: the first of python3, python3.13, python3.12, python3.11 that is 3.11 or newer).
# TORCH: what to install as torch (default: torch==2.13.0 without a GPU, any version that fits with one).
# TORCH_INDEX: package index for torch alone.
set -eu

venv=$1
extra=$2

log=$venv/install.log

say() { printf '==> %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
# What pip says is hundreds of lines: they go to a file, and are shown where it fails. Modules are compiled when they are first
# imported: most of those that come along never are.
pip_install() {
    "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check --no-input "$@" >"$log" 2>&1 || {
        cat "$log" >&2
        fail "pip could not install what is needed; its own words are above."
    }
}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    found=$(python3 --version 2>/dev/null || echo "no python3")
    fail "Python 3.11 or newer is needed, found: $found. Install one, or name it: make PYTHON=/path/to/python3.11"
}

if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer."
    python=$PYTHON
else
    python=$(find_python)
fi

say "1/3 environment $venv with $("$python" --version)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    rm -rf "$venv"
    fail "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
}
new_enough "$venv/bin/python" || fail "$venv is older than Python 3.11. Remove it with: make clean"

# With a GPU the newest version is not always the one that its driver can run, so any that fits may stay or come.
if nvidia-smi >/dev/null 2>&1; then default_torch="torch>=2.11,<2.15"; else default_torch="torch==2.13.0"; fi
torch=${TORCH:-$default_torch}

# First and alone, so that nothing else chooses another build of it.
say "2/3 $torch: the largest download, a minute or more the first time"
pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"

say "3/3 workbench[$extra]"
pip_install --editable ".[$extra]"
