export GIT_INDEX_FILE="$STORE/restore.index"
cd "$WORKDIR"
cat >"$STORE/listing"
rm -f "$GIT_INDEX_FILE"; ours read-tree "$TREE"
xargs -0 sh -c 'for folder; do if [ -L "$folder" ]; then rm -f -- "$folder"; fi; done' _ <"$STORE/folders"
xargs -0 rm -rf -- <"$STORE/listing"
# A listed file that the baseline does not have is complained of, and rightly stays away.
ours checkout-index -f -q -z --stdin <"$STORE/listing" || true
