# Sourced by the scripts: `packages NAME==VERSION ...` makes an environment in a temporary folder and enters it.
set -euo pipefail
packages() {
  folder="$(mktemp --directory)"
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
  if command -v uv >/dev/null; then
    "${PYTHON:-python3}" -m venv --without-pip environment
    uv pip install --quiet --python environment/bin/python "$@"
  else
    "${PYTHON:-python3}" -m venv environment
    environment/bin/python -m pip install --quiet "$@"
  fi
  PATH="$folder/environment/bin:$PATH"
  export OMP_NUM_THREADS=1
}
