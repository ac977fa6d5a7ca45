export GIT_INDEX_FILE="$STORE/apply.index"
cd "$WORKDIR"
(unset GIT_INDEX_FILE; eval "$HOW") 2>&1 || exit 1
# What is deleted shows in the tree; what is written is newer than its start, whether git looks there or not.
cp -p "$STORE/index" "$GIT_INDEX_FILE"
ours add -A --ignore-errors 2>/dev/null || true
ours diff-index --cached --name-only --no-renames -z "$TREE" >"$STORE/names"
find . -path ./.git -prune -o -newer "$STORE/index" \( -type f -o -type l \) -print0 >"$STORE/written"
