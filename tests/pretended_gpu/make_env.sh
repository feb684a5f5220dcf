#!/usr/bin/env bash
# Makes build/pretended-gpu/venv: torch's CUDA build, without NVIDIA's libraries, and what tests need.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/pretended-gpu/venv
# Python 3.12 as on the GPU machines, else the Python at hand. pyenv's own programs may only fail.
for python in ${PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 python3}; do
  "$python" -c '' 2>/dev/null && break
done
rm -rf "$folder"
mkdir -p build/pretended-gpu
"$python" -m venv "$folder"
# constraints.txt pins another torch.
export PIP_CONSTRAINT=/dev/null PIP_BUILD_CONSTRAINT=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$folder/bin/python" -m pip install -q --no-compile)
# --no-deps leaves out gigabytes of libraries: build.py makes those that are needed.
"${pip[@]}" --no-deps torch==2.11.0 triton==3.6.0
"${pip[@]}" filelock typing-extensions sympy networkx jinja2 fsspec numpy packaging platformdirs \
  'setuptools<82' pybind11 cmake ninja pytest pytest-xdist pytest-benchmark hypothesis psutil \
  transformers==5.24.0
touch "$folder/installed"
