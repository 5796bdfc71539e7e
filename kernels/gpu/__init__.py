"""Triton kernels for CUDA and ROCm devices, and what runs them on a CPU: Triton's interpreter.

One op is one file: the torch reference, which is its specification; the kernel; the one public call; and `variants`, every
form of the kernel that some machine compiles. Tile sizes are fixed by what a process never changes (the device, the model's
shape, its dtype), never by the batch, and nothing is tuned while serving: so a row's result does not depend on its
neighbours, two workers agree, and nothing is compiled after the first requests' warm-up.
"""
