# Sourced by the scripts a person runs: strict mode, then everything else in dev/lib.
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")
for part in common probe process packages postgres redis kafka native containers; do
  # shellcheck source=/dev/null
  . "$lib/$part.sh"
done
