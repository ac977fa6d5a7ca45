export GIT_INDEX_FILE="$STORE/apply.index"
cd "$WORKDIR"
ours apply --binary --whitespace=nowarn "$STORE/incoming" 2>&1
ours apply --numstat -z "$STORE/incoming" >"$STORE/numstat"
cp -p "$STORE/index" "$GIT_INDEX_FILE"
ours add -A --ignore-errors 2>/dev/null || true
ours diff-index --cached --name-only --no-renames -z "$TREE" >"$STORE/names"
