#!/usr/bin/env bash
# vLLM 0.33 with Chord on a Hopper host that has PyTorch but neither vLLM nor a network:
#   run.sh FOLDER tiny|speed [OUT]
# FOLDER holds an unpacked vLLM as one .tar.xz of site-packages, and wheels of what else is missing there (jsonschema,
# jsonschema-specifications, referencing, rpds-py). OUT (default: the current folder) gets logs and results as JSON.
set -euo pipefail
folder=$(realpath "$1") what=$2 out=$(realpath "${3:-.}")
cd "$(dirname "$0")/../../.."
site=${TMPDIR:-/tmp}/chord-vllm-site
mkdir -p "$site"
exec 9>"$site/lock"
flock 9
if [ ! -e "$site/ready" ]; then
  tar -C "$site" -xJf "$folder"/*.tar.xz
  for wheel in "$folder"/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
  # vLLM 0.33 gives up its own NCCL calls, which data parallelism needs, if a library lacks these two: they are for
  # sleep mode, and the library of PyTorch 2.11 is older.
  sed -i '/Function("ncclComm\(Suspend\|Resume\)"/d' "$site/vllm/distributed/device_communicators/pynccl_wrapper.py"
  python3 -m compileall -q -j 0 "$site" >/dev/null || true  # once, not in every process that starts
  # What installing this checkout would do: the plugin's entry point here, the packer below.
  version=$(python3 -c 'from chord_runtime import __version__; print(__version__)')
  info=$site/chord_moe-$version.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: chord-moe\nVersion: %s\n' "$version" >"$info/METADATA"
  printf '[vllm.general_plugins]\nchord = chord_runtime.integrations.vllm:register\n' >"$info/entry_points.txt"
  touch "$site/ready"
fi
packer=chord_runtime/format/_pack$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
if [ ! -e "$packer" ]; then
  include=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  c++ -std=c++17 -O3 -fno-math-errno -shared -fPIC -I"$include" csrc/pack/pack.cpp -o "$packer"
fi
exec 9>&-
# On some hosts a program that uses NVLink multicast can harm others.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export PYTHONPATH=$PWD:$site HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
trap '' TERM # is the script's to handle: it saves what there is, and tee must see that
python3 -m "tests.vllm.h200.$what" "$out" 2>&1 | tee "$out/$what.log"
