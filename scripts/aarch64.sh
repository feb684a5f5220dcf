#!/bin/sh
# Create $1/python, an ARM Python with torch that runs in qemu, and cross-compile the CPU module for it.
#
# The cross compiler, qemu and Python are Debian packages. Python and its libraries are ARM packages, which
# are unpacked instead of installed. torch is the oldest tested version, whose ARM wheel is CPU-only.
set -eu
out=$1
suite=aarch64-linux-gnu
version=3.11
packages="python$version python$version-minimal libpython$version libpython$version-dev
  libpython$version-minimal libpython$version-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g
  libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libreadline8 libncursesw6
  libtinfo6 libdb5.3 libcrypt1 libnsl2 libtirpc3"

{ command -v $suite-g++ && command -v qemu-aarch64; } > /dev/null || {
  apt-get update -q
  apt-get install -q -y g++-$suite qemu-user
}
if [ ! -e "$out/root/usr/bin/python$version" ]; then
  mkdir -p "$out/packages" "$out/root"
  both="-o APT::Architectures::=$(dpkg --print-architecture) -o APT::Architectures::=arm64"
  apt-get $both update -q
  (cd "$out/packages" && apt-get $both download -q $(printf '%s:arm64 ' $packages))
  for package in "$out"/packages/*.deb; do dpkg -x "$package" "$out/root"; done
fi
if [ ! -e "$out/site/torch" ]; then
  PIP_CONSTRAINT= pip install -q --target "$out/site" --python-version $version --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux2014_aarch64 \
    torch==2.9.1 numpy pytest hypothesis expecttest
fi
extension=.cpython-311-$suite.so
cmake -S . -B "$out/build" -G Ninja --log-level=WARNING -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$suite-g++ \
  -DCMAKE_CXX_FLAGS="-isystem $out/root/usr/include" -DPython_EXECUTABLE="$(command -v python)" \
  -DPython_INCLUDE_DIR="$out/root/usr/include/python$version" \
  -DPYTHON_MODULE_EXTENSION=$extension -Dpybind11_DIR="$(python -m pybind11 --cmakedir)"
cmake --build "$out/build"
cp --remove-destination "$out/build/_cpu$extension" fused_attn/
cat > "$out/python" << END
#!/bin/sh
exec env PYTHONPATH="$PWD:$out/site" qemu-aarch64 -cpu max -L "$out/root" \\
  "$out/root/usr/bin/python$version" "\$@"
END
chmod +x "$out/python"
