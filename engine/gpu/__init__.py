"""The engine on CUDA and ROCm devices: the same plans, carried out by Triton kernels, cuBLAS and CUDA graphs."""
