"""The CUDA side of the kernels: the runtime's calls, programs compiled at run time, and their launches."""
