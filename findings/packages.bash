# Sourced by the scripts: `packages NAME==VERSION ...` makes an environment in a temporary folder and enters it.
set -euo pipefail
packages() {
  folder="$(mktemp --directory)"
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
  "${PYTHON:-python3}" -m venv environment
  if command -v uv >/dev/null; then
    uv pip install --quiet --python environment/bin/python "$@"
  else
    environment/bin/python -m pip install --quiet "$@"
  fi
  PATH="$folder/environment/bin:$PATH"
  export OMP_NUM_THREADS=1
}
