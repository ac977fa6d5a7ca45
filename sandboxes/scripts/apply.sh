export GIT_INDEX_FILE="$STORE/apply.index"
cd "$WORKDIR"
(unset GIT_INDEX_FILE; eval "$HOW") 2>&1 || exit 1
ours apply --numstat -z "$STORE/incoming" >"$STORE/numstat" 2>/dev/null || : >"$STORE/numstat"
cp -p "$STORE/index" "$GIT_INDEX_FILE"
ours add -A --ignore-errors 2>/dev/null || true
ours diff-index --cached --name-only --no-renames -z "$TREE" >"$STORE/names"
