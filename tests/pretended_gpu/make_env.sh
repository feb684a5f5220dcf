#!/usr/bin/env bash
# Create build/pretended-gpu/venv with torch's CUDA build, without NVIDIA's libraries, and the packages
# that the tests need.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/pretended-gpu/venv
# Prefer Python 3.12, as on the GPU machines. Try each candidate, because a shim of pyenv may name a
# version that is not installed.
for python in ${PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 python3}; do
  "$python" -c '' 2>/dev/null && break
done
rm -rf "$folder"
mkdir -p build/pretended-gpu
"$python" -m venv "$folder"
# Ignore constraints.txt, which pins another torch.
export PIP_CONSTRAINT=/dev/null PIP_BUILD_CONSTRAINT=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$folder/bin/python" -m pip install -q --no-compile)
# --no-deps avoids gigabytes of NVIDIA's libraries. build.py creates stubs of those that torch loads.
"${pip[@]}" --no-deps torch==2.11.0 triton==3.6.0
"${pip[@]}" filelock typing-extensions sympy networkx jinja2 fsspec numpy packaging platformdirs \
  'setuptools<82' pybind11 cmake ninja pytest pytest-xdist pytest-benchmark hypothesis psutil \
  transformers==5.24.0
touch "$folder/installed"
