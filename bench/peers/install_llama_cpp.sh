#!/bin/sh
# llama.cpp, compiled for a named instruction set, in a virtual environment of its own:
#   install_llama_cpp.sh FOLDER [avx2|avx512] [PYTHON]
# Needs a C++ compiler and about ten minutes of two idle cores. The set is named because what the build's own detection
# (GGML_NATIVE) finds may be more than a virtual machine lets a program use, which then dies with SIGILL.
set -eu
folder=$1
isa=${2:-avx2}
python=${3:-python3}
release=0.3.36

flags="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
if [ "$isa" = avx512 ]; then
    flags="$flags -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON"
fi

"$python" -m venv "$folder"
export CMAKE_ARGS="$flags" CMAKE_BUILD_PARALLEL_LEVEL=2
"$folder/bin/pip" install --no-binary llama-cpp-python "llama-cpp-python==$release"
