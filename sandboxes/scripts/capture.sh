export GIT_INDEX_FILE="$STORE/capture.index"
cd "$WORKDIR" || { echo "the directory $WORKDIR is gone"; exit 1; }
ours cat-file -e "$TREE" 2>/dev/null || { echo "the recorded start of $WORKDIR was deleted"; exit 1; }
rm -f "$GIT_INDEX_FILE" "$GIT_INDEX_FILE.lock"
# -p: git trusts recorded times only of files older than the index; a younger copy would hide quick edits
cp -p "$STORE/index" "$GIT_INDEX_FILE" 2>/dev/null || ours read-tree "$TREE"
echo '* -text -ident -filter !eol !working-tree-encoding !diff' >"$STORE/info/attributes"
hide_nested
unreadable=0
ours add -A --ignore-errors 2>"$STORE/errors" || unreadable=$(grep -c '^error: open' "$STORE/errors" || true)
ours diff-index --cached -p --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
  --src-prefix=a/ --dst-prefix=b/ "$TREE" >"$STORE/patch"
ours diff-index --cached --name-only --no-renames -z "$TREE" >"$STORE/names"
ignored=$(list_ignored | grep -vxcFf "$STORE/ignored" || true)
echo "captured $((ignored)) $((unreadable))"
