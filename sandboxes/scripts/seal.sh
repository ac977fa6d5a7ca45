cd "$WORKDIR" || { echo "there is no directory $WORKDIR"; exit 1; }
rm -rf "$STORE"; mkdir -p "${STORE%/*}"
fresh="${STORE%/*}/fresh.git"; rm -rf "$fresh"
commit_all() { # message, date, more options of add: commit the working tree as it is
  git add -A ${3:-}
  GIT_AUTHOR_NAME=swe-env GIT_AUTHOR_EMAIL=swe-env@localhost GIT_COMMITTER_NAME=swe-env \
    GIT_COMMITTER_EMAIL=swe-env@localhost GIT_AUTHOR_DATE="$2" GIT_COMMITTER_DATE="$2" \
    git commit -q --allow-empty --no-verify --no-gpg-sign -m "$1"
}

if [ -z "$BASE" ]; then
  find . -name .git -prune -exec rm -rf {} +
  git init -q . && git symbolic-ref HEAD refs/heads/main
  commit_all "Start" "2020-01-01T00:00:00Z" -f
else
  commit=$(git rev-parse -q --verify "$BASE^{commit}") ||
    { echo "commit $BASE is not in the image's repository"; exit 1; }
  branch=$(git symbolic-ref -q --short HEAD || echo main)
  when=$(git show -s --format=%ct "$commit")
  git init -q --bare "$fresh"
  # Tags of older commits stay (version numbers are computed from them). An annotated tag is an object
  # with a date of its own: one made after the base commit becomes a plain name.
  git for-each-ref --merged="$commit" refs/tags \
    --format='%(refname) %(objectname) %(objecttype) %(taggerdate:unix) %(*objectname)' |
    while read -r ref object type date peeled; do
      if [ "$type" != tag ]; then echo "$ref $object"
      elif [ "${date:-0}" -le "$when" ] 2>/dev/null; then echo "$ref $object"
      else echo "$ref $peeled"; fi
    done >"$fresh/tags"
  { echo "$commit"; cut -d' ' -f2 "$fresh/tags"; } |
    git pack-objects -q --revs --delta-base-offset "$fresh/objects/pack/pack" >/dev/null
  shallow="$(git rev-parse --git-dir)/shallow"
  if [ -f "$shallow" ]; then cp "$shallow" "$fresh/shallow"; fi
  sed 's/^\([^ ]*\) \(.*\)$/create \1 \2/' "$fresh/tags" | git --git-dir="$fresh" update-ref --stdin
  git --git-dir="$fresh" update-ref "refs/heads/$branch" "$commit"
  git --git-dir="$fresh" symbolic-ref HEAD "refs/heads/$branch"
  git --git-dir="$fresh" config core.bare false
  rm "$fresh/tags"
  # Objects that lie elsewhere (an alternate store, the repository of which this is a worktree) have a
  # future, too, and nothing needs them any more.
  common=$(cd "$(git rev-parse --git-common-dir)" && pwd -P)
  if [ -f "$common/objects/info/alternates" ]; then
    while IFS= read -r elsewhere; do
      (cd "$common/objects" && cd "$elsewhere" && pwd -P)
    done <"$common/objects/info/alternates" | while IFS= read -r path; do rm -rf "$path"; done
  fi
  case "$common/" in "$(pwd -P)"/*) ;; *) rm -rf "$common" ;; esac
  find . -name .git -prune -exec rm -rf {} +
  mv "$fresh" .git
  git reset -q --mixed "$commit"
  [ -z "$(git status --porcelain --ignore-submodules=all)" ] ||
    commit_all "Working tree at the start of the task" "$when +0000"
fi
rm -rf .git/hooks .git/logs .git/ORIG_HEAD
git config core.logAllRefUpdates false && git config --unset core.logAllRefUpdates

# The store: bytes as they are on disk (no line-ending, keyword or filter conversion), modes and links kept.
git init -q --bare "$STORE"
ours config core.bare false; ours config core.autocrlf false; ours config core.fileMode true
ours config core.symlinks true; ours config core.quotePath true; ours config core.compression 1
echo '* -text -ident -filter !eol !working-tree-encoding !diff' >"$STORE/info/attributes"
# Files that are tracked although .gitignore names them come first, by name; then the rest.
git ls-files -z | ours update-index --add --remove -z --stdin 2>/dev/null || true
hide_nested
ours add -A --ignore-errors 2>/dev/null || true
tree=$(ours write-tree)
list_ignored >"$STORE/ignored"
echo "tree $tree"
