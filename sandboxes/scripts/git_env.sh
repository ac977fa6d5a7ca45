set -eu
# Nothing that the image or the agent configured may steer git here: no system, user or repository
# configuration, no hooks, no filters, no replacement objects, no prompts.
if [ -n "${BASH_VERSION-}" ]; then eval 'unset ${!GIT_@}' # without starting two programs
else unset $(env | sed -n 's/^\(GIT_[A-Za-z0-9_]*\)=.*/\1/p'); fi || true
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/nonexistent LC_ALL=C
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0
export GIT_CONFIG_COUNT=4 \
  GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' \
  GIT_CONFIG_KEY_1=core.hooksPath GIT_CONFIG_VALUE_1=/dev/null \
  GIT_CONFIG_KEY_2=core.fsmonitor GIT_CONFIG_VALUE_2=false \
  GIT_CONFIG_KEY_3=gc.auto GIT_CONFIG_VALUE_3=0
command -v git >/dev/null || { echo "the image has no git: install it in the image"; exit 1; }

# Run git on our own store and the agent's working tree.
ours() { GIT_DIR="$STORE" GIT_WORK_TREE="$WORKDIR" git "$@"; }

# Untracked files that .gitignore names, one a line; a directory of nothing else is one line.
list_ignored() { ours ls-files --others --ignored --exclude-standard --directory -z | tr '\n\0' '?\n'; }

# Repositories inside the repository would be recorded as bare links, their files lost: while git looks
# at the tree their .git is elsewhere.
hide_nested() {
  nested="$STORE/nested"; rm -rf "$nested"; mkdir -p "$nested"; trap show_nested EXIT
  command -v find >/dev/null || return 0
  find "$WORKDIR" -mindepth 2 -name .git -prune -print 2>/dev/null >"$nested/list" || true
  n=0
  while IFS= read -r path; do n=$((n + 1)); mv "$path" "$nested/$n"; done <"$nested/list"
}
show_nested() {
  [ -s "$nested/list" ] || return 0
  n=0
  while IFS= read -r path; do n=$((n + 1)); mv "$nested/$n" "$path"; done <"$nested/list"
}

