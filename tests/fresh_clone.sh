#!/usr/bin/env bash
# Clones HEAD to a temporary folder, makes a fresh environment there by the README's own command, and checks the
# demo's last lines and that nothing is left running. Run by hand: it takes some ten minutes and installs everything anew.
#
#   tests/fresh_clone.sh
set -uo pipefail

source=$(cd "$(dirname "$0")/.." && git rev-parse --show-toplevel) || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
log=$folder/demo.log

fail() {
    echo "--- the end of the log:"
    tail -n 30 "$log" 2>/dev/null
    echo "FAIL: $1"
    exit 1
}

command=$(grep -m 1 -oE '^make demo' "$source/README.md") || fail "the README does not say make demo"
git clone --quiet "$source" "$folder/clone" || fail "git clone"
cd "$folder/clone" || fail "no clone"

# Nothing of the caller's environment or settings may help.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME MAKEFLAGS MAKELEVEL
export XDG_CONFIG_HOME=$folder/config XDG_STATE_HOME=$folder/state SPHEROID_RUNTIME_DIR=$folder/runtime
for name in $(env | grep -oE '^SPHEROID_[A-Z_]+' | grep -v SPHEROID_RUNTIME_DIR); do unset "$name"; done

echo "$command in $PWD"
$command >"$log" 2>&1 || fail "$command ended with exit code $?"

tail -n 12 "$log"
tail -n 12 "$log" | grep -q '^From-noise CE: [0-9.]* after the first round, [0-9.]* at the end' || fail "no cross-entropy in the last lines"
for what in Model Logs Figure; do
    path=$(tail -n 12 "$log" | sed -n "s/^$what: *//p")
    [ -e "$path" ] || fail "$what is not where the last lines say: '$path'"
done
model=$(tail -n 12 "$log" | sed -n 's/^Model: *//p')
.venv/bin/python -c 'import sys; from spheroid_node.model import load; load(sys.argv[1])' "$model" || fail "the model does not load"
[ -z "$(git status --porcelain)" ] || fail "the demo left files that git sees: $(git status --porcelain | head -n 3)"
left=$(ps -eo pid,args | grep -F "$folder" | grep -vE 'grep|fresh_clone' || true)
[ -z "$left" ] || fail "still running: $left"

echo "PASS"
